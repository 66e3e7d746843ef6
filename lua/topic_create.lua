-- topic_create: absent -> present
--
-- Create a topic with its partition count and settings. The first call determines both, and later
-- calls do not change them. The script cannot add the topic to the registry of all topics, which is
-- in another slot, so the caller adds the topic's name with a separate call. Because the caller may
-- die before that call, every producer adds the name too when it starts.
--
-- KEYS[1]  meta        HASH  streaming:mq:topic:{T}:meta
-- KEYS[2]  partitions  SET   streaming:mq:topic:{T}:partitions
--
-- ARGV[1]  count       int   partition count
-- ARGV[2]  settings    str   settings of the topic, as JSON
-- ARGV[3..] streams    list  names of the partition streams
--
-- Returns  OK        the topic was created
-- Returns  EXISTS    the topic already exists
--                    [2] its partition count
--                    [3] its settings
-- Returns  DELETING  the topic is being deleted
--
-- Cost     O(p), where p is the number of partitions
-- Repeat   idempotent: the second call returns EXISTS with the same count
-- @include _clock
-- @include _lists

local meta, partitions = KEYS[1], KEYS[2]
local count, settings, streams = ARGV[1], ARGV[2], slice(ARGV, 3, #ARGV)

local known = redis.call('HMGET', meta, 'partitionCount', 'settings', 'deleting')
if known[3] then
  return {'DELETING'}
end
if known[1] then
  return {'EXISTS', known[1], known[2] or ''}
end
redis.call('SCARD', partitions)

-- No writes above this line
local created = text(now_unix_ms())
redis.call('HSET', meta, 'partitionCount', count, 'settings', settings, 'created', created)
for at = 1, #streams, SLICE do
  redis.call('SADD', partitions, unpack(streams, at, math.min(at + SLICE - 1, #streams)))
end
return {'OK'}
