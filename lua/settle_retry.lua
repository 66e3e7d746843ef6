-- settle_retry: in-flight -> waiting
--
-- Move failed entries to the waiting retries, each with its own delay. The decision to retry is
-- made by `policy/settlement.py`, and the script either carries it out or rejects it. It moves the
-- body from the stream to the waiting retries inside the server, and acknowledges the entry in the
-- same step, so a message is always either pending or waiting, and never both. It also deletes the
-- counters of the entry, because its crash count is now one of its fields. If another client has
-- destroyed the group, the script raises NOGROUP, and the owner then restores the group with
-- `group_restore`.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  delayed   ZSET    streaming:mq:retry:{T:p:i}:G         sorted by due time
-- KEYS[5]  items     HASH    streaming:mq:retry:item:{T:p:i}:G    packed fields, by place
-- KEYS[6]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   token of the owner
-- ARGV[2]  group     str     consumer group
-- ARGV[3]  adjacent  flag    1 if the entries of each stream follow each other without a gap, so
--                            that the script can read them together
-- ARGV[4..] entries  list    first the changes that all entries share, as field_count and that many
--                            names and values. Then, for each entry, its place, its delay_ms and
--                            its own changes in the same form. If the own changes of an entry
--                            include `payload`, they are its whole body, because the entry has lost
--                            its body
--
-- Returns  OK      the entries were processed
--                  [2] a word for each entry, from the list below
--                  [3] earliest due time of all waiting retries in Unix milliseconds, or ''
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Entry    MOVED    the entry was moved to the waiting retries
-- Entry    GONE     the entry is not pending, because it was already settled or was passed twice in
--                   this call, so nothing was done
-- Entry    MISSING  the entry is pending, but its body is trimmed, deleted or too wide, so nothing
--                   was done. Repeat the call with all fields of the entry or, if these have more
--                   than 7,000 names and values, with the important ones
--
-- Cost     O(e x (log n + b)), where e is the number of entries, n the number of pending entries
--          and retries, and b the size of a body
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
    packed[#packed + 1] = cmsgpack.pack(change_fields(entry, shared, {}))
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
