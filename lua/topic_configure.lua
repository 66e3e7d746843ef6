-- topic_configure: registered settings -> other settings
--
-- Replace the registered settings of a topic, if they are unchanged since the caller saw them.
--
-- KEYS[1]  meta      HASH  streaming:mq:topic:{T}:meta
--
-- ARGV[1]  seen      str   JSON as read, '' = there was none
-- ARGV[2]  settings  str   JSON
--
-- Returns  OK       replaced
-- Returns  CHANGED  another client changed them    [2] the current settings
-- Returns  MISSING  no such topic
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns CHANGED with the wanted settings

local meta = KEYS[1]
local seen, settings = ARGV[1], ARGV[2]

local known = redis.call('HMGET', meta, 'partitionCount', 'settings')
if not known[1] then
  return {'MISSING'}
end
if (known[2] or '') ~= seen then
  return {'CHANGED', known[2] or ''}
end

-- No writes above this line
redis.call('HSET', meta, 'settings', settings)
return {'OK'}
