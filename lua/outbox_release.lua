-- outbox_release: held -> free
--
-- Release the lease of an outbox when its relay stops. The outbox keeps its epoch and its figures.
--
-- KEYS[1]  outbox  HASH    streaming:mq:outbox:{N}
-- KEYS[2]  lease   STRING  streaming:mq:outbox:{N}:lease
--
-- ARGV[1]  token   token   token of the relay
--
-- Returns  OK      the lease was released
-- Returns  FENCED  the relay does not hold the outbox, or no longer holds it
--                  [2] epoch of the outbox
--                  [3] owner of the outbox, or '' if there is none
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns FENCED. The script works when memory is full
-- @include _fence

local outbox, lease, token = KEYS[1], KEYS[2], ARGV[1]

local refusal = superseded(outbox, token)
if refusal then
  return refusal
end
local leased = redis.call('GET', lease)

-- No writes above this line
redis.call('HDEL', outbox, 'token', 'owner')
if leased == token then
  redis.call('DEL', lease)
end
return {'OK'}
