-- message_schedule: nothing -> delayed, for every group
--
-- Store a message until it is due. `message_promote` then writes it to the partition. The script
-- adds the field `sentAt` with the time of the server's clock, because the ID of the later entry
-- shows only when the message was due.
--
-- KEYS[1]  scheduled   ZSET    streaming:mq:delayed:{T:p:i}         score = due time, unix ms
-- KEYS[2]  items       HASH    streaming:mq:delayed:item:{T:p:i}    send ID -> packed fields
-- KEYS[3]? meta        HASH    streaming:mq:topic:{T}:meta          not on a cluster, where it is
--                                                                   in another slot
-- KEYS[4]? dedup       STRING  streaming:mq:dedup:{T:p:i}:<id>      only with a deduplication ID
--
-- ARGV[1]  partitions  int     partition count by which the message was routed
-- ARGV[2]  delay_ms    int     delay from this call, used if `at_ms` is -1
-- ARGV[3]  at_ms       int     due time, unix ms; a message with a past time is due immediately; -1
--                              = use `delay_ms`
-- ARGV[4]  send_id     str     new and random, reused only to repeat the same call
-- ARGV[5]  window_ms   int     how long the deduplication ID is remembered
-- ARGV[6..] fields     list    names and values of the message
--
-- Returns  OK         stored, by this call or an earlier copy
--                     [2] due time, unix ms
-- Returns  DUPLICATE  an earlier call has used this deduplication ID
--                     [2] send ID or entry ID of the message that it wrote
-- Returns  MOVED      the topic has a different partition count, or does not exist
--                     [2] current count, or ''
--
-- Cost     O(log n) plus the size of the body; n = delayed sends
-- Repeat   idempotent until the message is due. After that, only with a deduplication ID
-- @include _clock
-- @include _routed
-- @include _fields
-- @include _lists

local scheduled, items, meta, dedup = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local partitions, delay_ms, at_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local send_id, window_ms, fields = ARGV[4], ARGV[5], slice(ARGV, 6, #ARGV)

local present = moved(meta, scheduled, partitions)
if present then
  return {'MOVED', present}
end

redis.call('HLEN', items)
local earlier_due = redis.call('ZSCORE', scheduled, send_id)
if earlier_due then
  return {'OK', text(tonumber(earlier_due))}
end
if dedup ~= scheduled then
  local earlier = redis.call('GET', dedup)
  if earlier then
    return {'DUPLICATE', earlier}
  end
end

-- No writes above this line
local now = now_unix_ms()
local due = text(at_ms >= 0 and at_ms or now + delay_ms)
redis.call('HSET', items, send_id, cmsgpack.pack(merged(fields, {'sentAt', text(now)}, {})))
redis.call('ZADD', scheduled, due, send_id)
if dedup ~= scheduled then
  redis.call('SET', dedup, send_id, 'PX', window_ms)
end
return {'OK', due}
