-- pipeline_lease_take: free -> held
--
-- Make one run of a pipeline the only one of its kind. No fence stands behind it: what a run
-- publishes is refused by the archive itself when another has published it.
--
-- KEYS[1]  lease   STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token   token   the run's: host, process and chance, so that people can find it
-- ARGV[2]  ttl_ms  int     life of the lease from now
-- ARGV[3]  dead    str     token of a run whose process is known to have ended, or ''
--
-- Returns  OK      held
-- Returns  HELD    another run holds it     [2] its token [3] ms until it expires
--
-- Cost     O(1)
-- Repeat   safe: the second gives the lease a new life

local lease = KEYS[1]
local token, ttl_ms, dead = ARGV[1], ARGV[2], ARGV[3]

local leased = redis.call('GET', lease)
if leased and leased ~= token and leased ~= dead then
  return {'HELD', leased, redis.call('PTTL', lease)}
end

-- Guards end here
-- PEXPIRE is accepted when memory is full, and so is every write behind it: archives are what
-- makes room.
redis.call('PEXPIRE', lease, ttl_ms)
redis.call('SET', lease, token, 'PX', ttl_ms)
return {'OK'}
