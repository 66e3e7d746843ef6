-- lease_release: held -> free
--
-- Release the partition cleanly: nothing is inherited, and no entry is charged. The epoch stays,
-- so that the next owner's is greater. The token must not be used again after this call was sent.
-- Otherwise a late copy of the call would release a partition that is in use.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease   STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  epochs  LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  token   token   token of the owner
-- ARGV[2]  reason  str     reason of the release, for the history; '' = unknown
--
-- Returns  OK      free
-- Returns  FENCED  not, or no longer, the owner     [2] epoch [3] owner
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
