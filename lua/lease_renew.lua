-- lease_renew: held -> held
--
-- Extend the lease. The fence decides: if the lease expired while the fence still has this token,
-- it is set again under the same epoch. So a server pause longer than the lease costs no ownership.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease   STRING  streaming:mq:lease:{T:p:i}:G
--
-- ARGV[1]  token   token   token of the owner
-- ARGV[2]  ttl_ms  int     lifetime of the lease from now
--
-- Returns  OK      renewed
-- Returns  LATE    expired, and set again
-- Returns  LOST    the lease holds another token although the fence holds this one: a broken
--                  invariant
-- Returns  FENCED  another owner, or none      [2] epoch [3] owner
--
-- Cost     O(1)
-- Repeat   safe: a late copy can only extend a lease whose token is current. Works when memory is
--          full
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
-- PEXPIRE is accepted when memory is full, and so is every write after it.
if redis.call('PEXPIRE', lease, ttl_ms) == 1 then
  return {'OK'}
end
redis.call('SET', lease, token, 'PX', ttl_ms)
return {'LATE'}
