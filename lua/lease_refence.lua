-- lease_refence: held -> held (epoch + 1 or later), for the successor of an exited worker
--
-- Replace the token of a worker process that has exited by the token of its successor. From then
-- on, Redis rejects commands of the old worker that arrive late. In the same step, the script
-- acknowledges the entries that the worker had finished, and charges the entry that it was running.
-- If these were three separate calls, a lost reply could charge the entry twice, and a crash
-- between the calls could leave it uncharged.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease     STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[4]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[5]  retry     STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  old       token   token of the exited worker
-- ARGV[2]  new       token   token of its successor
-- ARGV[3]  ttl_ms    int     lifetime of the lease, from this call
-- ARGV[4]  group     str     consumer group
-- ARGV[5]  charged   str     place of the entry that the worker was running, or '' to charge none
-- ARGV[6]  context   bytes   description of the crash, stored with the charge
-- ARGV[7..] done     list    places of the entries that the worker had finished
--
-- Returns  OK      the token was replaced, by this call or an earlier copy
--                  [2] epoch
--                  [3] total number of crashes of the charged entry
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(d + log n), where d is the number of places in `done` and n the number of pending
--          entries
-- Repeat   idempotent: the second call finds the new token, and neither changes nor charges
--          anything. The script works when memory is full
-- @include _clock
-- @include _fence
-- @include _numbers
-- @include _lists
-- @include _places

local fence, lease, attempts, stream, retry = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local old, new, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local group, charged, context = ARGV[4], ARGV[5], ARGV[6]
local done = slice(ARGV, 7, #ARGV)

local held = redis.call('HMGET', fence, 'token', 'epoch')
local epoch = to_int(held[2])
if not epoch then
  return bad_value(fence, 'epoch', 'a whole number')
end
local crashes = to_int(redis.call('HGET', attempts, charged .. ':c')) or 0
if held[1] == new then
  return {'OK', text(epoch), crashes}
end
local refusal = superseded(fence, old)
if refusal then
  return refusal
end
local counted = redis.call('HLEN', attempts) > 0
redis.call('STRLEN', lease)
local main_ids, retry_ids, bad = sort_places(stream, retry, done)
local source, charged_id = locate(stream, retry, charged)
if bad or (charged ~= '' and not source) then
  return redis.error_reply('ERR not a place: ' .. (bad or charged))
end
redis.call('XLEN', stream)
redis.call('XLEN', retry)
local is_charged = source and is_entry_pending(source, group, charged_id)

-- No writes above this line
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', fence, 'mark', 'session')
if is_charged then
  crashes = increment(attempts, charged .. ':c', 1)
  redis.call('HSET', attempts, charged .. ':last', context)
end
local now = now_unix_ms()
epoch = math.max(epoch + 1, now)
redis.call('HSET', fence, 'token', new, 'epoch', text(epoch), 'since', text(now))
redis.call('SET', lease, new, 'PX', ttl_ms)
acknowledge(stream, group, main_ids)
acknowledge(retry, group, retry_ids)
if counted then
  forget_all_attempts(attempts, done)
end
return {'OK', text(epoch), crashes}
