-- settle_retry: in-flight -> delayed
--
-- Set entries aside, each for its delay. The decision was made in policy/settlement.py; this script
-- only carries it out, or refuses. The body goes from the stream to the delayed set inside the
-- server. The attempts of the entry end here: its crash count travels on in its fields.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  delayed   ZSET    streaming:mq:retry:{T:p:i}:G          score = due, unix ms
-- KEYS[5]  items     HASH    streaming:mq:retry:item:{T:p:i}:G     place -> packed fields
-- KEYS[6]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   the owner's
-- ARGV[2]  group     str     consumer group
-- ARGV[3..] entries  list    for each entry: place, delay_ms, field_count, so many names and values
--                            that change. With a `payload` among them, they are the whole body of
--                            an entry that has lost its own
--
-- Returns  OK      [2] a word for each entry [3] earliest due time of all delayed, unix ms, or ''
-- Returns  FENCED  another owner, or none      [2] epoch [3] owner
--
-- Entry    MOVED   set aside
-- Entry    GONE    not pending, nothing done (settled before, or named twice in this call)
-- Entry    GHOST   pending, but its body is trimmed, deleted or too wide; nothing done: repeat with
--                  all fields, or of more than 7,000 names and values with those that matter
--
-- Cost     O(e x (log n + size of a body)), e = entries, n = pending and delayed entries
-- Repeat   safe: the second answers GONE for each
-- @include _clock
-- @include _fence
-- @include _lists
-- @include _places
-- @include _fields
-- @include _items

local fence, stream, retry, delayed, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local attempts = KEYS[6]
local token, group = ARGV[1], ARGV[2]

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local entries = read_items(3, true)
local bad = judge_items(entries, stream, retry, group)
if bad then
  return redis.error_reply('ERR not a place: ' .. bad)
end
redis.call('ZCARD', delayed)
redis.call('HLEN', items)
redis.call('HLEN', attempts)

-- Guards end here
-- Entry by entry, its insertion first and its source last: a write that is refused leaves every
-- entry in exactly one place.
local now = now_unix_ms()
local words = {}
for at, entry in ipairs(entries) do
  words[at] = entry.word
  if entry.word == 'MOVED' then
    local fields = merged(entry.body, entry.changed, {})
    redis.call('HSET', items, entry.place, cmsgpack.pack(fields))
    redis.call('ZADD', delayed, text(now + entry.delay_ms), entry.place)
    forget_attempts(attempts, entry.place)
    redis.call('XACK', entry.source, group, entry.id)
  end
end
local first = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
return {'OK', words, first[2] and text(tonumber(first[2])) or ''}
