-- outbox_renew: held -> held
--
-- Extend the lease of a relay, and publish its figures. The holder is determined by the token in
-- the outbox's hash, and not by the lease. If the lease has expired but no other relay has acquired
-- the outbox, the script sets the lease again under the same epoch.
--
-- KEYS[1]  outbox    HASH    streaming:mq:outbox:{N}
-- KEYS[2]  lease     STRING  streaming:mq:outbox:{N}:lease
--
-- ARGV[1]  token     token   token of the relay
-- ARGV[2]  ttl_ms    int     lifetime of the lease, from this call
-- ARGV[3..] figures  list    names and values of the figures. The script adds the current time as
--                            `at`
--
-- Returns  OK      the lease was renewed
-- Returns  FENCED  another relay holds the outbox, or no relay does
--                  [2] epoch of the outbox
--                  [3] owner of the outbox, or '' if there is none
--
-- Cost     O(f), where f is the number of figures
-- Repeat   safe: a late copy can only extend the lease of the relay that holds the outbox. The
--          script works when memory is full
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
