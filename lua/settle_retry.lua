-- settle_retry: in-flight -> waiting
--
-- Move failed entries to the waiting retries, each with its own delay. policy/settlement.py has
-- decided to retry them, and the script carries out this decision or rejects it. It moves the body
-- from the stream to the waiting retries inside the server, and acknowledges the entry in the same
-- step, so a message is in exactly one of the two places. It removes the attempts of the entry,
-- whose crash count continues in its fields. If another client has destroyed the group, the script
-- raises NOGROUP, and the owner then restores the group with `group_restore`.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  delayed   ZSET    streaming:mq:retry:{T:p:i}:G         score = due time, unix ms
-- KEYS[5]  items     HASH    streaming:mq:retry:item:{T:p:i}:G    place -> packed fields
-- KEYS[6]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   token of the owner
-- ARGV[2]  group     str     consumer group
-- ARGV[3]  adjacent  flag    1 = no other entry lies between those of each stream, so the script
--                            reads them together
-- ARGV[4..] entries  list    first the changes that all entries share: field_count, and that many
--                            names and values; then for each entry: place, delay_ms, field_count,
--                            and that many names and values that change in it. If these include
--                            `payload`, they are the whole body of an entry that has lost its own
--
-- Returns  OK      processed
--                  [2] a word for each entry, from the list below
--                  [3] earliest due time of all waiting retries, unix ms, or ''
-- Returns  FENCED  another owner holds the assignment, or none does
--                  [2] epoch in the fence
--                  [3] owner in the fence, or ''
--
-- Entry    MOVED    moved to the waiting retries
-- Entry    GONE     the entry is not pending, because it was already settled or was passed twice in
--                   this call; nothing was done
-- Entry    MISSING  the entry is pending, but its body is trimmed, deleted or too wide; nothing was
--                   done. Repeat the call with all fields or, beyond 7,000 names and values, with
--                   the important ones
--
-- Cost     O(e x (log n + size of a body)); e = entries, n = pending entries and retries
-- Repeat   idempotent: the second call returns GONE for each entry
-- @include _clock
-- @include _fence
-- @include _lists
-- @include _places
-- @include _fields
-- @include _settle_items
-- @include _settle_outcomes

local fence, stream, retry, delayed, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local attempts = KEYS[6]
local token, group, adjacent = ARGV[1], ARGV[2], ARGV[3]

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local entries, shared = read_items(4, true)
local refused = decide_outcomes(entries, shared, adjacent == '1', stream, retry, group)
if refused then
  return refused
end
redis.call('ZCARD', delayed)
redis.call('HLEN', items)
local counted = redis.call('HLEN', attempts) > 0

-- No writes above this line
-- All insertions come before the entries are removed from their sources. The server accepts or
-- rejects each write for all entries together, so every entry is in exactly one place.
local now = now_unix_ms()
local words, packed, dues = {}, {}, {}
local ids = {[stream] = {}, [retry] = {}}
for at, entry in ipairs(entries) do
  words[at] = entry.word
  if entry.word == 'MOVED' then
    packed[#packed + 1] = entry.place
    packed[#packed + 1] = cmsgpack.pack(renewed(entry, shared, {}))
    dues[#dues + 1] = text(now + entry.delay_ms)
    dues[#dues + 1] = entry.place
    table.insert(ids[entry.source], entry.id)
  end
end
if #packed > 0 then
  redis.call('HSET', items, unpack(packed))
  redis.call('ZADD', delayed, unpack(dues))
  for at = 2, counted and #dues or 0, 2 do
    forget_attempts(attempts, dues[at])
  end
  acknowledge(stream, group, ids[stream])
  acknowledge(retry, group, ids[retry])
end
local first = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
return {'OK', words, first[2] and text(tonumber(first[2])) or ''}
