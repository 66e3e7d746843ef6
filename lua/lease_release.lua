-- lease_release: held -> free
--
-- Release an assignment that its owner gives up in an orderly way. The next owner therefore does
-- not run the pending entries in quarantine, and no entry is charged with a crash. The epoch stays
-- in the fence, so that the next owner gets a greater one.
--
-- The caller must not use the token again once it has sent this call. Otherwise, a late copy of the
-- call would release an assignment that is in use.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease   STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  epochs  LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  token   token   token of the owner
-- ARGV[2]  reason  str     reason of the release, which is stored in the history of owners, or ''
--                          if unknown
--
-- Returns  OK      the assignment was released
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns FENCED. The script works when memory is full
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
