-- retry_cancel: waiting -> dead, or waiting -> nothing
--
-- Cancel waiting retries before they are due. Each retry becomes a dead letter, which consists of
-- its body and the fields that describe the failure. If `drop` is set, the script removes the
-- retries without writing dead letters. Delayed sends can only be canceled with `drop`.
--
-- KEYS[1]  delayed   ZSET    streaming:mq:retry:{T:p:i}:G, or streaming:mq:delayed:{T:p:i}
-- KEYS[2]  items     HASH    streaming:mq:retry:item:{T:p:i}:G, or
--                            streaming:mq:delayed:item:{T:p:i}
-- KEYS[3]  dlq       STREAM  stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  drop      flag    1 to write no dead letters
-- ARGV[2..] entries  list    for each entry: its place, and then field_count and that many names
--                            and values to change
--
-- Returns  OK  the entries were processed
--              [2] a word for each entry, from the list below
--              [3] ID of the dead letter for each entry, or ''
--
-- Entry    MOVED       the entry was removed and, unless `drop` is set, dead-lettered
-- Entry    GONE        the entry was not waiting, so nothing was done
-- Entry    UNREADABLE  the item cannot become a dead letter, so nothing was done. A call with
--                      `drop` can remove it
--
-- Cost     O(e x (log n + b)), where e is the number of entries, n the number of waiting retries,
--          and b the size of a body
-- Repeat   idempotent: the second call returns GONE for each entry. With `drop`, the script works
--          when memory is full
-- @include _clock
-- @include _lists
-- @include _fields

local delayed, items, dlq = KEYS[1], KEYS[2], KEYS[3]
local drop, entries = ARGV[1], slice(ARGV, 2, #ARGV)

local function unpack_body(packed)
  local readable, body = pcall(cmsgpack.unpack, packed or '')
  if readable and type(body) == 'table' and #body > 0 and #body <= WIDE and #body % 2 == 0 then
    return body
  end
  return nil
end

local chosen, seen = {}, {}
local at = 1
while at <= #entries do
  local last = at + 1 + tonumber(entries[at + 1])
  local entry = {place = entries[at], changed = slice(entries, at + 2, last)}
  if seen[entry.place] or not redis.call('ZSCORE', delayed, entry.place) then
    entry.word = 'GONE'
  else
    -- An item that is dropped need not be readable.
    entry.body = drop ~= '1' and unpack_body(redis.call('HGET', items, entry.place))
    entry.word = 'MOVED'
    if drop ~= '1' and not entry.body then
      entry.word = 'UNREADABLE'
    end
  end
  seen[entry.place] = true
  chosen[#chosen + 1] = entry
  at = last + 1
end
redis.call('HLEN', items)
redis.call('XLEN', dlq)

-- No writes above this line
-- The entries are moved one after the other. Each one is inserted before it is removed from its
-- source, so if the server rejects a write, every entry is still in exactly one place.
local failed_at = text(now_unix_ms())
local words, letters = {}, {}
for number, entry in ipairs(chosen) do
  words[number], letters[number] = entry.word, ''
  if entry.word == 'MOVED' then
    if drop ~= '1' then
      local fields = merge_fields(entry.body, entry.changed, {failedAt = true})
      letters[number] = redis.call('XADD', dlq, '*', 'failedAt', failed_at, unpack(fields))
    end
    redis.call('ZREM', delayed, entry.place)
    redis.call('HDEL', items, entry.place)
  end
end
return {'OK', words, letters}
