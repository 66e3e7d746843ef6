-- lease_release: held -> free
--
-- Release an assignment whose owner has left it in order. The next owner does not run its pending
-- entries in quarantine, and no entry is charged. The epoch stays in the fence, so the next owner
-- gets a greater one.
--
-- The caller must not use the token again once it has sent this call. Otherwise, a late copy of the
-- call would release an assignment that is in use.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease   STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  epochs  LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  token   token   token of the owner
-- ARGV[2]  reason  str     reason of the release, for the history of owners; '' = unknown
--
-- Returns  OK      released
-- Returns  FENCED  another owner holds the assignment, or none does
--                  [2] epoch in the fence
--                  [3] owner in the fence, or ''
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns FENCED. Works when memory is full
-- @include _clock
-- @include _fence
-- @include _owner_changes

local fence, lease, epochs = KEYS[1], KEYS[2], KEYS[3]
local token, reason = ARGV[1], ARGV[2]

local refusal, held = superseded(fence, token)
if refusal then
  return refusal
end
local leased = redis.call('GET', lease)

-- No writes above this line
redis.call('HDEL', fence, 'token', 'session', 'mark', 'quarantine', 'accused', 'owner')
if leased == token then
  redis.call('DEL', lease)
end
note_change(epochs, 'released', held[2] or '0', held[3] or '', reason)
return {'OK'}
