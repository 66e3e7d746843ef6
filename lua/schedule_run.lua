-- schedule_run: nothing -> ready, one message of a schedule on request
--
-- Send one message of a schedule immediately, for an operator. The due time of the schedule does
-- not change. The caller passes the time that the headers of the message contain. This time must be
-- later than that of the schedule's last message, so a repeated call does not send the message
-- again.
--
-- KEYS[1]  schedules   HASH    streaming:mq:schedule:{T:p:i}         specification and state of
--                              each schedule
-- KEYS[2]  last        HASH    streaming:mq:schedule:last:{T:p:i}    last message and counters of
--                              each schedule
-- KEYS[3]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[4]? meta        HASH    streaming:mq:topic:{T}:meta           not on a cluster, where the
--                              key is in another slot
--
-- ARGV[1]  name        str     name of the schedule
-- ARGV[2]  hash        str     hash of its specification
-- ARGV[3]  partitions  int     partition count by which the key of the message was routed
-- ARGV[4]  instant     int     time that the headers of the message contain in Unix milliseconds
-- ARGV[5..] fields     list    names and values of the message
--
-- Returns  OK       the message was written
--                   [2] ID of the entry
-- Returns  CHANGED  the specification has changed, or the schedule does not exist
-- Returns  AGAIN    the instant is not later than that of the schedule's last message; pass a later
--                   one
-- Returns  MOVED    the topic now has a different partition count, or does not exist
--                   [2] current partition count, or 0 if the topic does not exist
--
-- Cost     O(1) plus the size of the body
-- Repeat   idempotent: the second call returns AGAIN
-- @include _lists
-- @include _numbers

local schedules, last, stream, meta = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local name, hash, partitions, instant = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local fields = slice(ARGV, 5, #ARGV)

local count = meta ~= schedules and redis.call('HGET', meta, 'partitionCount')
if meta ~= schedules and count ~= partitions then
  return {'MOVED', count or '0'}
end
if redis.call('HGET', schedules, name .. ':hash') ~= hash then
  return {'CHANGED'}
end
local tick, ran = unpack(redis.call('HMGET', last, name .. ':tick', name .. ':ran'))
if instant <= math.max(to_int(tick or nil) or 0, to_int(ran or nil) or 0) then
  return {'AGAIN'}
end
redis.call('XLEN', stream)

-- No writes above this line
local id = redis.call('XADD', stream, '*', unpack(fields))
redis.call('HSET', last, name .. ':ran', ARGV[4], name .. ':id', id)
return {'OK', id}
