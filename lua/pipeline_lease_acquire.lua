-- pipeline_lease_acquire: free -> held
--
-- Take the lease of a pipeline, so that only one of its runs is active. The lease needs no fence,
-- because the archive itself rejects a part that another run has already published.
--
-- KEYS[1]  lease   STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token   token   token of the run, which consists of its host, its process and a random
--                          part, so that an operator can find the run
-- ARGV[2]  ttl_ms  int     lifetime of the lease, from this call
-- ARGV[3]  dead    str     token of a run whose process has exited, so that its lease can be taken
--                          over, or '' for none
--
-- Returns  OK    the lease was acquired
-- Returns  HELD  another run holds the lease
--                [2] token of that run
--                [3] milliseconds until the lease expires
--
-- Cost     O(1)
-- Repeat   idempotent: the second call extends the lease. The script works when memory is full

local lease = KEYS[1]
local token, ttl_ms, dead = ARGV[1], ARGV[2], ARGV[3]

local leased = redis.call('GET', lease)
if leased and leased ~= token and leased ~= dead then
  return {'HELD', leased, redis.call('PTTL', lease)}
end

-- No writes above this line
-- PEXPIRE is first because Redis accepts it when memory is full, and then accepts later writes too.
-- Archiving must be able to run at that time, because it frees memory.
redis.call('PEXPIRE', lease, ttl_ms)
redis.call('SET', lease, token, 'PX', ttl_ms)
return {'OK'}
