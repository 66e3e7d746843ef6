-- settle_dead: in-flight -> dead
--
-- Give up entries. Each becomes a dead letter: its body plus the fields that describe the failure.
-- `failedAt` is added here by the server's clock.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  dlq       STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[5]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   token of the owner
-- ARGV[2]  group     str     consumer group
-- ARGV[3]  adjacent  flag    1 = the entries of each stream are adjacent, so they are read together
-- ARGV[4..] entries  list    first the changes that all entries share: field_count, then that many
--                            names and values; then for each entry: place, field_count, and that
--                            many names and values that change in it. If these include `payload`,
--                            they are the whole body of an entry that has lost its own
--
-- Returns  OK      [2] a word for each entry [3] id of the dead letter for each entry, or ''
-- Returns  FENCED  another owner, or none      [2] epoch [3] owner
--
-- Entry    MOVED    dead-lettered
-- Entry    GONE     not pending. Nothing done (already settled, or passed twice in this call)
-- Entry    MISSING  pending, but its body is trimmed, deleted or too wide. Nothing done. Repeat
--                   with all fields, or, beyond 7,000 names and values, with the important ones
--
-- Cost     O(e x (log n + size of a body)), e = entries, n = pending entries
-- Repeat   idempotent: the second call returns GONE for each
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
-- Entry by entry, insertion first and source last: if the server rejects a write, every entry is
-- still in exactly one place.
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
