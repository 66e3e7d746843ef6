-- message_find: read-only
--
-- Find the entries of a message in a stream by the value of one field. With `originalId`, the
-- script finds copies of the message in a retry stream, among dead letters and among replays. With
-- `sendId`, it finds the entry of a delayed send. It examines the entries inside the server, so no
-- payload is transferred to the client.
--
-- KEYS[1]  stream  STREAM  any stream of a partition
--
-- ARGV[1]  field   str     name of the field, `originalId` or `sendId`
-- ARGV[2]  value   str     value of the field to find
-- ARGV[3]  from    id      first entry to examine
-- ARGV[4]  count   int     maximum number of entries to examine, rounded up to a multiple of eight
--
-- Returns  OK  the entries were examined
--              [2] matching entries, each with its ID and with its fields except payload, headers
--              and traceback
--              [3] ID of the next entry to examine, or '' if all entries were examined
--
-- Cost     O(log n + count), where n is the number of entries. The script reads at most 512 KiB of
--          bodies plus eight more
-- Repeat   safe, because the script only reads
-- @include _byte_limit
-- @include _ids

local stream, field, value, from, count = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

-- Number of entries per read. It is small, so that few bodies are copied beyond the byte limit.
local AT_ONCE = 8
local COPIES_MAX = 100
local LEFT_OUT = {payload = true, headers = true, traceback = true}

local function copy_fields(fields)
  local found, ours = {}, false
  for at = 1, #fields - 1, 2 do
    if fields[at] == field and fields[at + 1] == value then
      ours = true
    end
    if not LEFT_OUT[fields[at]] then
      found[#found + 1] = fields[at]
      found[#found + 1] = fields[at + 1]
    end
  end
  return ours and found
end

local copies, seen, bytes = {}, 0, 0
while from ~= '' and seen < count and bytes < BYTES_MAX and #copies < COPIES_MAX do
  local page = redis.call('XRANGE', stream, from, '+', 'COUNT', AT_ONCE)
  for _, entry in ipairs(page) do
    local fields = copy_fields(entry[2])
    if fields then
      copies[#copies + 1] = {entry[1], fields}
    end
    bytes = bytes + fields_size(entry[2])
  end
  seen = seen + #page
  local last = #page == AT_ONCE and page[#page][1] or ''
  -- No entry follows the greatest ID.
  from = (last == '' or last == LAST_SEQ .. '-' .. LAST_SEQ) and '' or successor(last)
end
return {'OK', copies, from}
