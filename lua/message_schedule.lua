-- message_schedule: nothing -> delayed, for every group
--
-- Keep a message until it is due. message_promote then writes it to the partition. `sentAt` is
-- added here by the server's clock, because the id of the later entry shows its due time.
--
-- KEYS[1]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}          score = due, unix ms
-- KEYS[2]  items      HASH    streaming:mq:delayed:item:{T:p:i}     send id -> packed fields
-- KEYS[3]? meta       HASH    streaming:mq:topic:{T}:meta           not on a cluster: another slot
-- KEYS[4]? dedup      STRING  streaming:mq:dedup:{T:p:i}:<id>       only with a dedup id
--
-- ARGV[1]  partitions int     partition count by which the message was routed
-- ARGV[2]  delay_ms   int     delay from now, if `at_ms` is -1
-- ARGV[3]  at_ms      int     due time, unix ms. A past one is due immediately. -1 = none
-- ARGV[4]  send_id    str     new, random; reused only to repeat this very call
-- ARGV[5]  window_ms  int     how long the dedup id is remembered
-- ARGV[6..] fields    list    names and values
--
-- Returns  OK         scheduled, now or by an earlier copy of this call   [2] due, unix ms
-- Returns  DUPLICATE  the dedup id was used before  [2] send id or entry id of that message
-- Returns  MOVED      the topic has a different partition count, or none  [2] the count, or ''
--
-- Cost     O(log n) + size of the body, n = delayed sends
-- Repeat   safe until the message is due; after that only with a dedup id
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
