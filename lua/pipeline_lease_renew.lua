-- pipeline_lease_renew: held -> held
--
-- Extend the lease of a pipeline. Unlike the lease of an assignment, it cannot be renewed after it
-- has expired, even if no run holds it now, because another run may have started and finished in
-- the meantime.
--
-- KEYS[1]  lease   STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token   token   token of the run
-- ARGV[2]  ttl_ms  int     lifetime of the lease, from this call
--
-- Returns  OK    the lease was renewed
-- Returns  LOST  the lease has expired, or another run holds it
--
-- Cost     O(1)
-- Repeat   safe: a late copy can only extend a lease that the run still holds. The script works
--          when memory is full

local lease = KEYS[1]
local token, ttl_ms = ARGV[1], ARGV[2]

if redis.call('GET', lease) ~= token then
  return {'LOST'}
end

-- No writes above this line
redis.call('PEXPIRE', lease, ttl_ms)
return {'OK'}
