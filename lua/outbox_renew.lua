-- outbox_renew: held -> held
--
-- Extend the lease of a relay, and publish its figures. The token in the outbox's hash determines
-- the holder, and not the lease. If the lease has expired but no other relay has acquired the
-- outbox, the script sets the lease again under the same epoch.
--
-- KEYS[1]  outbox    HASH    streaming:mq:outbox:{N}
-- KEYS[2]  lease     STRING  streaming:mq:outbox:{N}:lease
--
-- ARGV[1]  token     token   token of the relay
-- ARGV[2]  ttl_ms    int     lifetime of the lease, from this call
-- ARGV[3..] figures  list    names and values; the script adds `at`, the current time
--
-- Returns  OK      renewed
-- Returns  FENCED  another relay holds the outbox, or none does
--                  [2] epoch of the outbox
--                  [3] its owner, or ''
--
-- Cost     O(f); f = figures
-- Repeat   safe: a late copy can only extend the lease of the relay that holds the outbox. Works
--          when memory is full
-- @include _clock
-- @include _fence
-- @include _lists

local outbox, lease = KEYS[1], KEYS[2]
local token, ttl_ms, figures = ARGV[1], ARGV[2], slice(ARGV, 3, #ARGV)

local refusal = superseded(outbox, token)
if refusal then
  return refusal
end
redis.call('STRLEN', lease)

-- No writes above this line
-- Redis accepts PEXPIRE when memory is full, and then accepts later writes too.
if redis.call('PEXPIRE', lease, ttl_ms) == 0 then
  redis.call('SET', lease, token, 'PX', ttl_ms)
end
redis.call('HSET', outbox, 'at', text(now_unix_ms()), unpack(figures))
return {'OK'}
