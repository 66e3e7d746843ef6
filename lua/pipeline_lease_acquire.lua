-- pipeline_lease_acquire: free -> held
--
-- Ensure that only one run of a pipeline is active. The lease has no fence: if another run has
-- published a part, the archive itself rejects a second publication.
--
-- KEYS[1]  lease   STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token   token   of the run: host, process and random part, so that an operator can find
--                          it
-- ARGV[2]  ttl_ms  int     lifetime of the lease from now
-- ARGV[3]  dead    str     token of a run whose process has exited, or ''
--
-- Returns  OK      held
-- Returns  HELD    another run holds it     [2] its token [3] ms until it expires
--
-- Cost     O(1)
-- Repeat   idempotent: the second call extends the lease

local lease = KEYS[1]
local token, ttl_ms, dead = ARGV[1], ARGV[2], ARGV[3]

local leased = redis.call('GET', lease)
if leased and leased ~= token and leased ~= dead then
  return {'HELD', leased, redis.call('PTTL', lease)}
end

-- No writes above this line
-- PEXPIRE first: it is accepted when memory is full, and so is every write after it. Archiving
-- frees memory, so it must run then.
redis.call('PEXPIRE', lease, ttl_ms)
redis.call('SET', lease, token, 'PX', ttl_ms)
return {'OK'}
