-- settle_dead: in-flight -> dead
--
-- Give up entries. Each entry becomes a dead letter, which consists of its body and the fields that
-- describe the failure. The script adds the current time of the server's clock as the field
-- `failedAt`. It writes the dead letter and acknowledges the entry in the same step, so a message
-- is always either pending or a dead letter, and never both. If another client has destroyed the
-- group, the script raises NOGROUP, and the owner then restores the group with `group_restore`.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  dlq       STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[5]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   token of the owner
-- ARGV[2]  group     str     consumer group
-- ARGV[3]  adjacent  flag    1 if the entries of each stream follow each other without a gap, so
--                            that the script can read them together
-- ARGV[4..] entries  list    first the changes that all entries share, as field_count and that many
--                            names and values. Then, for each entry, its place and its own changes
--                            in the same form. If the own changes of an entry include `payload`,
--                            they are its whole body, because the entry has lost its body
--
-- Returns  OK      the entries were processed
--                  [2] a word for each entry, from the list below
--                  [3] ID of the dead letter for each entry, or ''
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Entry    MOVED    the entry was dead-lettered
-- Entry    GONE     the entry is not pending, because it was already settled or was passed twice in
--                   this call, so nothing was done
-- Entry    MISSING  the entry is pending, but its body is trimmed, deleted or too wide, so nothing
--                   was done. Repeat the call with all fields of the entry or, if these have more
--                   than 7,000 names and values, with the important ones
--
-- Cost     O(e x (log n + b)), where e is the number of entries, n the number of pending entries,
--          and b the size of a body
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
    local fields = change_fields(entry, shared, ADDED)
    letters[at] = redis.call('XADD', dlq, '*', 'failedAt', failed_at, unpack(fields))
    if counted then
      forget_attempts(attempts, entry.place)
    end
    redis.call('XACK', entry.source, group, entry.id)
  end
end
return {'OK', words, letters}
