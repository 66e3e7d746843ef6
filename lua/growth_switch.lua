-- growth_switch: growing -> grown, for producers
--
-- Switch producers to the new partition count. Every write compares its partition count with this
-- key, so writes that were routed by the old count are rejected from this step on.
--
-- KEYS[1]  meta        HASH   streaming:mq:topic:{T}:meta
-- KEYS[2]  partitions  SET    streaming:mq:topic:{T}:partitions
--
-- ARGV[1]  token       token  of the growth
-- ARGV[2..] streams    list   names of the new partition streams
--
-- Returns  OK    switched, now or before
-- Returns  GONE  no such growth is in progress
--
-- Cost     O(p), p = new partitions
-- Repeat   safe
-- @include _lists

local meta, partitions = KEYS[1], KEYS[2]
local token, streams = ARGV[1], slice(ARGV, 2, #ARGV)

local known = redis.call('HMGET', meta, 'partitionCount', 'growTo', 'growToken')
if not known[1] or known[3] ~= token then
  return {'GONE'}
end
redis.call('SCARD', partitions)

-- No writes above this line
for at = 1, #streams, SLICE do
  redis.call('SADD', partitions, unpack(streams, at, math.min(at + SLICE - 1, #streams)))
end
redis.call('HSET', meta, 'partitionCount', known[2])
return {'OK'}
