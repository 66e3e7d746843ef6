-- settle_dead: in-flight -> dead
--
-- Give up entries. Each entry becomes a dead letter, which consists of its body and the fields that
-- describe the failure. The script adds `failedAt` with the time of the server's clock. It writes
-- the dead letter and acknowledges the entry in the same step, so a message is in exactly one of
-- the two places. If another client has destroyed the group, the script raises NOGROUP, and the
-- owner then restores the group with `group_restore`.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  dlq       STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[5]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   token of the owner
-- ARGV[2]  group     str     consumer group
-- ARGV[3]  adjacent  flag    1 = no other entry lies between those of each stream, so the script
--                            reads them together
-- ARGV[4..] entries  list    first the changes that all entries share: field_count, and that many
--                            names and values; then for each entry: place, field_count, and that
--                            many names and values that change in it. If these include `payload`,
--                            they are the whole body of an entry that has lost its own
--
-- Returns  OK      processed
--                  [2] a word for each entry, from the list below
--                  [3] ID of the dead letter for each entry, or ''
-- Returns  FENCED  another owner holds the assignment, or none does
--                  [2] epoch in the fence
--                  [3] owner in the fence, or ''
--
-- Entry    MOVED    dead-lettered
-- Entry    GONE     the entry is not pending, because it was already settled or was passed twice in
--                   this call; nothing was done
-- Entry    MISSING  the entry is pending, but its body is trimmed, deleted or too wide; nothing was
--                   done. Repeat the call with all fields or, beyond 7,000 names and values, with
--                   the important ones
--
-- Cost     O(e x (log n + size of a body)); e = entries, n = pending entries
-- Repeat   idempotent: the second call returns GONE for each entry
-- @include _clock
-- @include _fence
-- @include _lists
-- @include _places
-- @include _fields
-- @include _settle_items
-- @include _settle_outcomes

local fence, stream, retry, dlq, attempts = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local token, group, adjacent = ARGV[1], ARGV[2], ARGV[3]
local ADDED = {failedAt = true}

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local entries, shared = read_items(4, false)
local refused = decide_outcomes(entries, shared, adjacent == '1', stream, retry, group)
if refused then
  return refused
end
redis.call('XLEN', dlq)
local counted = redis.call('HLEN', attempts) > 0

-- No writes above this line
-- The entries are moved one after the other. Each one is inserted before it is removed from its
-- source, so if the server rejects a write, every entry is still in exactly one place.
local failed_at = text(now_unix_ms())
local words, letters = {}, {}
for at, entry in ipairs(entries) do
  words[at], letters[at] = entry.word, ''
  if entry.word == 'MOVED' then
    local fields = renewed(entry, shared, ADDED)
    letters[at] = redis.call('XADD', dlq, '*', 'failedAt', failed_at, unpack(fields))
    if counted then
      forget_attempts(attempts, entry.place)
    end
    redis.call('XACK', entry.source, group, entry.id)
  end
end
return {'OK', words, letters}
