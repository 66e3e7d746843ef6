-- growth_switch: growing -> grown, for producers
--
-- Switch producers to the new partition count. Every write compares the partition count by which
-- its messages were routed with the count in this key. From this call on, Redis therefore rejects
-- messages that were routed by the old count, and producers route them again.
--
-- KEYS[1]  meta        HASH   streaming:mq:topic:{T}:meta
-- KEYS[2]  partitions  SET    streaming:mq:topic:{T}:partitions
--
-- ARGV[1]  token       token  token of the growth
-- ARGV[2..] streams    list   names of the new partition streams
--
-- Returns  OK    producers are switched, by this call or an earlier one
-- Returns  GONE  no growth with this token is in progress
--
-- Cost     O(p), where p is the number of new partitions
-- Repeat   safe: the second call writes the same values
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
