-- pipeline_lease_renew: held -> held
--
-- Extend the lease. An expired lease is lost even if no run holds it now: another run may have
-- started and finished.
--
-- KEYS[1]  lease   STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token   token   token of the run
-- ARGV[2]  ttl_ms  int     lifetime of the lease from now
--
-- Returns  OK      held
-- Returns  LOST    expired, or held by another run
--
-- Cost     O(1)
-- Repeat   safe. Works when memory is full

local lease = KEYS[1]
local token, ttl_ms = ARGV[1], ARGV[2]

if redis.call('GET', lease) ~= token then
  return {'LOST'}
end

-- No writes above this line
redis.call('PEXPIRE', lease, ttl_ms)
return {'OK'}
