-- message_find: no transition, reads only
--
-- Find the copies of a message in a stream, by the id that it was first written under: entries of a
-- retry stream, dead letters, replays. Entries are looked at here, so that no body travels.
--
-- KEYS[1]  stream    STREAM  any stream of a partition
--
-- ARGV[1]  original  id   what `originalId` must be
-- ARGV[2]  from      id   first entry to look at
-- ARGV[3]  count     int  look at no more than this many
--
-- Returns  OK  [2] copies, each id, fields without payload, headers and traceback [3] entry to go on
--              with, or '' when all were looked at
--
-- Cost     O(log n + count) + 512 KiB of bodies at most and some more, n = entries
-- Repeat   safe: reads only
-- @include _bytes
-- @include _ids

local stream, original, from, count = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])

-- Entries that are copied at once: a large one copies few others beyond the limit.
local AT_ONCE = 8
local COPIES_MAX = 100
local LEFT_OUT = {payload = true, headers = true, traceback = true}

local function copied(fields)
  local found, ours = {}, false
  for at = 1, #fields - 1, 2 do
    if fields[at] == 'originalId' and fields[at + 1] == original then
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
    local fields = copied(entry[2])
    if fields then
      copies[#copies + 1] = {entry[1], fields}
    end
    bytes = bytes + size_of(entry[2])
  end
  seen = seen + #page
  local last = #page == AT_ONCE and page[#page][1] or ''
  -- Nothing is behind the greatest id.
  from = (last == '' or last == LAST_SEQ .. '-' .. LAST_SEQ) and '' or successor(last)
end
return {'OK', copies, from}
