-- topic_create: absent -> present
--
-- Create a topic with its partition count and settings. The first call decides them. The registry
-- of topics is in another slot, so every producer adds the topic's name there in a separate call
-- when it starts.
--
-- KEYS[1]  meta        HASH  streaming:mq:topic:{T}:meta
-- KEYS[2]  partitions  SET   streaming:mq:topic:{T}:partitions
--
-- ARGV[1]  count       int   partition count
-- ARGV[2]  settings    str   JSON
-- ARGV[3..] streams    list  names of the partition streams
--
-- Returns  OK        created
-- Returns  EXISTS    already created          [2] its count [3] its settings
-- Returns  DELETING  it is being deleted
--
-- Cost     O(p), p = partitions
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
