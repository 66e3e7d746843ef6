-- message_schedule: nothing -> delayed, for every group
--
-- Store a message until it is due. `message_promote` then writes it to the partition. The script
-- adds the field `sentAt` with the time of the server's clock, because the ID of the later entry
-- shows only when the message was due.
--
-- KEYS[1]  scheduled   ZSET    streaming:mq:delayed:{T:p:i}         sorted by due time
-- KEYS[2]  items       HASH    streaming:mq:delayed:item:{T:p:i}    packed fields, by send ID
-- KEYS[3]? meta        HASH    streaming:mq:topic:{T}:meta          not on a cluster, where the key
--                              is in another slot
-- KEYS[4]? dedup       STRING  streaming:mq:dedup:{T:p:i}:<id>      only with a deduplication ID
--
-- ARGV[1]  partitions  int     partition count by which the message was routed
-- ARGV[2]  delay_ms    int     delay from this call, which is used if `at_ms` is -1
-- ARGV[3]  at_ms       int     due time in Unix milliseconds, or -1 to use `delay_ms`. If the time
--                              has passed, the message is due immediately
-- ARGV[4]  send_id     str     ID of the delayed send, which is a new random value. It is used
--                              again only to repeat this call
-- ARGV[5]  window_ms   int     how long the deduplication ID is remembered
-- ARGV[6..] fields     list    names and values of the message
--
-- Returns  OK         the message is stored, by this call or an earlier copy
--                     [2] due time in Unix milliseconds
-- Returns  DUPLICATE  an earlier call has used this deduplication ID
--                     [2] send ID or entry ID of the message that it wrote
-- Returns  MOVED      the topic now has a different partition count, or does not exist
--                     [2] current partition count, or '' if the topic does not exist
--
-- Cost     O(log n) plus the size of the body, where n is the number of delayed sends
-- Repeat   idempotent until the message is due, and afterwards only with a deduplication ID
-- @include _clock
-- @include _routed
-- @include _fields
-- @include _lists

local scheduled, items, meta, dedup = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local partitions, delay_ms, at_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local send_id, window_ms, fields = ARGV[4], ARGV[5], slice(ARGV, 6, #ARGV)

local present = find_new_count(meta, scheduled, partitions)
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
redis.call('HSET', items, send_id, cmsgpack.pack(merge_fields(fields, {'sentAt', text(now)}, {})))
redis.call('ZADD', scheduled, due, send_id)
if dedup ~= scheduled then
  redis.call('SET', dedup, send_id, 'PX', window_ms)
end
return {'OK', due}
