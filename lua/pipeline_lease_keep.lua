-- pipeline_lease_keep: held -> held
--
-- Give the lease a new life. One that has expired is lost even if nobody holds it now: another run
-- may have come and gone.
--
-- KEYS[1]  lease   STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token   token   the run's
-- ARGV[2]  ttl_ms  int     life of the lease from now
--
-- Returns  OK      held
-- Returns  LOST    expired, or another run's
--
-- Cost     O(1)
-- Repeat   safe. Works when memory is full

local lease = KEYS[1]
local token, ttl_ms = ARGV[1], ARGV[2]

if redis.call('GET', lease) ~= token then
  return {'LOST'}
end

-- Guards end here
redis.call('PEXPIRE', lease, ttl_ms)
return {'OK'}
