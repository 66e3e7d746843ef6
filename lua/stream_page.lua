-- stream_page: no transition, reads only
--
-- Read a page of a stream with its bodies. XRANGE and XREVRANGE are bounded in rows only, so a page
-- also stops after 512 KiB of bodies.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  first   str   start of the page in the form of XRANGE: -, +, an id, or ( and an id
-- ARGV[2]  last    str   end of the range, in the same form
-- ARGV[3]  count   int   at most this many entries
-- ARGV[4]  newest  flag  1 = from the newest entry to the oldest
--
-- Returns  OK  [2] entries, each id and fields [3] 1 = there may be more
--
-- Cost     O(count x log n) + at most 512 KiB of bodies plus one more, n = entries
-- Repeat   safe: reads only
-- @include _bytes
-- @include _ids

local stream, first, last = KEYS[1], ARGV[1], ARGV[2]
local count, newest = tonumber(ARGV[3]), ARGV[4]

local command = newest == '1' and 'XREVRANGE' or 'XRANGE'

local entries, bytes, more = {}, 0, true
while more and #entries < count and bytes < BYTES_MAX do
  local entry = redis.call(command, stream, first, last, 'COUNT', 1)[1]
  if entry then
    entries[#entries + 1] = entry
    bytes = bytes + size_of(entry[2])
    first = '(' .. entry[1]
  end
  -- No range starts after the greatest id.
  more = entry ~= nil and (newest == '1' or entry[1] ~= LAST_ID)
end
return {'OK', entries, more and 1 or 0}
