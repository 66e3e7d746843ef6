-- lease_renew: held -> held
--
-- Extend the lease of an assignment. The owner is determined by the token in the fence, and not by
-- the lease. If the lease has expired but the fence still contains the token, no other instance has
-- acquired the assignment, so the script sets the lease again under the same epoch. As a result, an
-- owner keeps its assignment even if the server pauses for longer than the lease lasts.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease   STRING  streaming:mq:lease:{T:p:i}:G
--
-- ARGV[1]  token   token   token of the owner
-- ARGV[2]  ttl_ms  int     lifetime of the lease, from this call
--
-- Returns  OK      the lease was renewed
-- Returns  LATE    the lease had expired and was set again
-- Returns  LOST    the fence contains this token, but the lease contains another one, which must
--                  never happen
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(1)
-- Repeat   safe: a late copy can only extend a lease whose token is still in the fence. The script
--          works when memory is full
-- @include _fence

local fence, lease = KEYS[1], KEYS[2]
local token, ttl_ms = ARGV[1], ARGV[2]

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local leased = redis.call('GET', lease)
if leased and leased ~= token then
  return {'LOST'}
end

-- No writes above this line
-- Redis accepts PEXPIRE when memory is full, and then accepts later writes too.
if redis.call('PEXPIRE', lease, ttl_ms) == 1 then
  return {'OK'}
end
redis.call('SET', lease, token, 'PX', ttl_ms)
return {'LATE'}
