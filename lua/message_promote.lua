-- message_promote: waiting, due -> ready
--
-- Move due items to a stream: the waiting retries of a group to its retry stream, or the delayed
-- sends of a partition to that partition. The script needs no fence, because each move is atomic
-- and idempotent. Any process may therefore call it, even repeatedly or at the same time as other
-- processes.
--
-- An item that cannot be moved as it is must not block the items after it. If an item has too many
-- fields for one write, the script therefore moves only the fields that streamqd knows. If it
-- cannot read an item, it keeps the item and postpones it.
--
-- KEYS[1]  delayed  ZSET    streaming:mq:retry:{T:p:i}:G, or streaming:mq:delayed:{T:p:i}
-- KEYS[2]  items    HASH    streaming:mq:retry:item:{T:p:i}:G, or streaming:mq:delayed:item:{T:p:i}
-- KEYS[3]  target   STREAM  stream:topic:{T:p:i}:retry:G, or stream:topic:{T:p:i}
--
-- ARGV[1]  count    int     maximum number of items to move
--
-- Returns  OK  the items were moved
--              [2] number of items moved
--              [3] members of `delayed` that had no item and were removed
--              [4] next due time in Unix milliseconds, or ''
--              [5] members of `delayed` whose item cannot be read, which were postponed by a minute
--              [6] 1 if more items are due
--
-- Cost     O(count x log n), where n is the number of waiting items. The script reads at most 512
--          KiB of bodies plus one more
-- Repeat   safe: a second call moves the next due items
-- @include _clock
-- @include _byte_limit

local delayed, items, target = KEYS[1], KEYS[2], KEYS[3]
local count = ARGV[1]

local PUT_OFF_MS = 60000
-- The maximum number of names and values of one write, because `unpack` fails near 8,000.
local WIDEST = 7900
local KNOWN = {
  payload = true, key = true, headers = true, sentAt = true, originalId = true,
  expiresAt = true, expiresAfter = true,
  retryCount = true, crashCount = true, replayCount = true,
}

local function scalar(value)
  return type(value) == 'string' or type(value) == 'number'
end

-- Return the names and values of an item, alternating, or nil if it contains anything else.
local function unpack_fields(packed)
  local readable, fields = pcall(cmsgpack.unpack, packed)
  if not readable or type(fields) ~= 'table' or #fields == 0 or #fields % 2 == 1 then
    return nil
  end
  local known = {}
  for at = 1, #fields, 2 do
    local name, value = fields[at], fields[at + 1]
    if not scalar(name) or not scalar(value) then
      return nil
    end
    if KNOWN[name] then
      known[#known + 1] = name
      known[#known + 1] = value
    end
  end
  return #fields <= WIDEST and fields or #known > 0 and known or nil
end

local now = now_unix_ms()
local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', text(now), 'LIMIT', 0, count)
redis.call('HLEN', items)
redis.call('XLEN', target)

-- No writes above this line
-- All insertions come first, and then the moved members are removed together. If the server rejects
-- an insertion, it is the last one, and its error (a table) is returned after the removal. If the
-- server rejects the first insertion, the error is raised, because nothing was written.
local orphans, unreadable, size = 0, 0, 0
local gone, written = {}, nil
for _, member in ipairs(due) do
  if size >= BYTES_MAX or type(written) == 'table' then
    break
  end
  local packed = redis.call('HGET', items, member)
  size = size + (packed and #packed or 0)
  local fields = packed and unpack_fields(packed)
  local write = #gone == 0 and redis.call or redis.pcall
  if fields then
    written = write('XADD', target, '*', unpack(fields))
    gone[#gone + 1] = type(written) ~= 'table' and member or nil
  elseif packed then
    written = write('ZADD', delayed, text(now + PUT_OFF_MS), member)
    unreadable = unreadable + 1
  else
    redis.call('ZREM', delayed, member)
    orphans = orphans + 1
  end
end
if #gone > 0 then
  redis.call('ZREM', delayed, unpack(gone))
  redis.call('HDEL', items, unpack(gone))
end
if type(written) == 'table' then
  return written
end
local first = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
local next_due = tonumber(first[2])
local more = next_due and next_due <= now and 1 or 0
return {'OK', #gone, orphans, next_due and text(next_due) or '', unreadable, more}
