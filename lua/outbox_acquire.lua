-- outbox_acquire: free -> held (epoch + 1 or later)
--
-- Give the lease of an outbox to one relay. Every call sets a new epoch, even if the relay already
-- holds the outbox. A relay depends on this when a reply is lost. It then acquires its outbox again
-- and fences the partitions with the new epoch, so that Redis rejects a late copy of the call whose
-- reply was lost.
--
-- KEYS[1]  outbox  HASH    streaming:mq:outbox:{N}
-- KEYS[2]  lease   STRING  streaming:mq:outbox:{N}:lease
--
-- ARGV[1]  token   token   token of the relay, which consists of its host, its process and a random
--                          part
-- ARGV[2]  ttl_ms  int     lifetime of the lease, from this call
-- ARGV[3]  owner   str     host and process of the relay, for operators
-- ARGV[4]  above   int     the new epoch is greater than this number, or 0 for no condition
-- ARGV[5]  dead    str     token of a relay whose process has exited, so that its lease can be
--                          taken over, or '' for none
--
-- Returns  OK    the lease was acquired
--                [2] epoch
-- Returns  HELD  another relay holds a valid lease
--                [2] token of that relay
--                [3] milliseconds until the lease expires
--                [4] owner that the lease names
--
-- Cost     O(1)
-- Repeat   safe: a second call sets another epoch. The script works when memory is full
-- @include _clock
-- @include _numbers

local outbox, lease = KEYS[1], KEYS[2]
local token, ttl_ms, owner = ARGV[1], ARGV[2], ARGV[3]
local above, dead = tonumber(ARGV[4]), ARGV[5]

local held = redis.call('HMGET', outbox, 'epoch', 'owner')
local leased = redis.call('GET', lease)
if leased and leased ~= token and leased ~= dead then
  return {'HELD', leased, redis.call('PTTL', lease), held[2] or ''}
end
local epoch = to_int(held[1])
if not epoch then
  return bad_value(outbox, 'epoch', 'a whole number')
end

-- No writes above this line
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', outbox, 'error')
local now = now_unix_ms()
epoch = math.max(epoch, above, now - 1) + 1
redis.call('HSET', outbox, 'token', token, 'epoch', text(epoch), 'owner', owner, 'since', text(now))
redis.call('SET', lease, token, 'PX', ttl_ms)
return {'OK', text(epoch)}
