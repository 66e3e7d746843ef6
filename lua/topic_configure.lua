-- topic_configure: registered settings -> others
--
-- Replace the settings that are registered with a topic, if they are still those that the caller has
-- seen.
--
-- KEYS[1]  meta      HASH  streaming:mq:topic:{T}:meta
--
-- ARGV[1]  seen      str   JSON, as it was read; '' = there was none
-- ARGV[2]  settings  str   JSON
--
-- Returns  OK       replaced
-- Returns  CHANGED  another client changed them meanwhile    [2] the present ones
-- Returns  MISSING  there is no such topic
--
-- Cost     O(1)
-- Repeat   safe: the second answers CHANGED, with what it wanted

local meta = KEYS[1]
local seen, settings = ARGV[1], ARGV[2]

local known = redis.call('HMGET', meta, 'partitionCount', 'settings')
if not known[1] then
  return {'MISSING'}
end
if (known[2] or '') ~= seen then
  return {'CHANGED', known[2] or ''}
end

-- Guards end here
redis.call('HSET', meta, 'settings', settings)
return {'OK'}
