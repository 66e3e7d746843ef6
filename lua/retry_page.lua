-- retry_page: read-only
--
-- Return one page of a group's waiting retries or of a partition's delayed sends, earliest first.
-- The script measures the payloads inside the server, so no payload is transferred to the client.
--
-- KEYS[1]  delayed      ZSET  streaming:mq:retry:{T:p:i}:G, or streaming:mq:delayed:{T:p:i}
-- KEYS[2]  items        HASH  streaming:mq:retry:item:{T:p:i}:G, or
--                             streaming:mq:delayed:item:{T:p:i}
--
-- ARGV[1]  after_due    int   due time of the last row of the previous page in Unix milliseconds,
--                             or 0 to start at the beginning
-- ARGV[2]  after_place  str   place of the last row of the previous page, or '' to start at the
--                             beginning
-- ARGV[3]  count        int   maximum number of rows to return
--
-- Returns  OK  the page is returned
--              [2] rows, each with its place, its due time, the size of its payload in bytes (-1 if
--              the item cannot be read), and its fields except payload and headers
--              [3] 1 if there may be more rows
--
-- Cost     O(log n + count), where n is the number of waiting retries. The script reads at most 512
--          KiB of bodies plus one more
-- Repeat   safe, because the script only reads
-- @include _clock
-- @include _byte_limit

local delayed, items = KEYS[1], KEYS[2]
local after_due, after_place, count = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])

-- Maximum number of pages that are read for one reply. More than one page is necessary only if the
-- last row of the previous reply is gone and many others are due in the same millisecond.
local PAGES = 100

local function describe_message(packed)
  local readable, fields = pcall(cmsgpack.unpack, packed)
  if not readable or type(fields) ~= 'table' or #fields % 2 == 1 then
    return -1, {}
  end
  for _, part in ipairs(fields) do
    if type(part) ~= 'string' and type(part) ~= 'number' then
      return -1, {}
    end
  end
  local size, shown = -1, {}
  for at = 1, #fields, 2 do
    if fields[at] == 'payload' then
      size = string.len(fields[at + 1])
    elseif fields[at] ~= 'headers' then
      shown[#shown + 1] = fields[at]
      shown[#shown + 1] = fields[at + 1]
    end
  end
  return size, shown
end

local first = 0
if after_place ~= '' then
  local due = redis.call('ZSCORE', delayed, after_place)
  if due and tonumber(due) == after_due then
    first = redis.call('ZRANK', delayed, after_place) + 1
  else
    first = redis.call('ZCOUNT', delayed, '-inf', '(' .. ARGV[1])
  end
end
local rows, bytes, more = {}, 0, true
for _ = 1, PAGES do
  local page = redis.call('ZRANGE', delayed, first, first + count - 1, 'WITHSCORES')
  more = #page == 2 * count
  for at = 1, #page, 2 do
    local place, due = page[at], tonumber(page[at + 1])
    local behind = due > after_due or (due == after_due and place > after_place)
    if #rows == count or bytes >= BYTES_MAX then
      more = true
    elseif behind or after_place == '' then
      local packed = redis.call('HGET', items, place) or ''
      local size, shown = describe_message(packed)
      rows[#rows + 1] = {place, text(due), size, shown}
      bytes = bytes + #packed
    end
  end
  first = first + count
  if #rows == count or bytes >= BYTES_MAX or not more then
    break
  end
end
return {'OK', rows, more and 1 or 0}
