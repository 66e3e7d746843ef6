-- pipeline_lease_release: held -> free
--
-- Release the lease of a pipeline when a run finishes.
--
-- KEYS[1]  lease  STRING  streaming:mq:pipeline:{T}:N
--
-- ARGV[1]  token  token   token of the run
--
-- Returns  OK    the lease was released
-- Returns  LOST  the lease has expired, or another run holds it
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns LOST. The script works when memory is full

local lease, token = KEYS[1], ARGV[1]

if redis.call('GET', lease) ~= token then
  return {'LOST'}
end

-- No writes above this line
redis.call('DEL', lease)
return {'OK'}
