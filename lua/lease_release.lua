-- lease_release: held -> free
--
-- Give the partition back, clean: nothing is inherited and nobody is charged. The epoch stays, so
-- that the next owner's is greater. The token is dead from the moment this call was sent: used
-- again, a late copy of this call would release under its owner's feet.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease   STRING  streaming:mq:lease:{T:p:i}:G
--
-- ARGV[1]  token   token   the owner's
--
-- Returns  OK      free
-- Returns  FENCED  not (or no longer) the owner's: success for a repeat     [2] epoch [3] owner
--
-- Cost     O(1)
-- Repeat   safe: the second answers FENCED. Works when memory is full
-- @include _fence

local fence, lease = KEYS[1], KEYS[2]
local token = ARGV[1]

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local leased = redis.call('GET', lease)

-- Guards end here
redis.call('HDEL', fence, 'token', 'session', 'mark', 'solo', 'accused', 'owner')
if leased == token then
  redis.call('DEL', lease)
end
return {'OK'}
