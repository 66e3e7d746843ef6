-- topic_configure: registered settings -> other settings
--
-- Replace the registered settings of a topic, if no other client has changed them since the caller
-- read them.
--
-- KEYS[1]  meta      HASH  streaming:mq:topic:{T}:meta
--
-- ARGV[1]  seen      str   settings that the caller read, as JSON, or '' if there were none
-- ARGV[2]  settings  str   new settings, as JSON
--
-- Returns  OK       the settings were replaced
-- Returns  CHANGED  another client has changed the settings
--                   [2] current settings
-- Returns  MISSING  the topic does not exist
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns CHANGED with the settings that the first one wrote

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
