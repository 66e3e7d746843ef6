-- stream_page: read-only
--
-- Read a page of a stream with its bodies. XRANGE and XREVRANGE can limit only the number of
-- entries, so a reply with large bodies could become very large. A page of this script therefore
-- also stops after 512 KiB of bodies, and at most the last body exceeds this limit.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  first   str     start of the range as in XRANGE, which is -, +, an ID, or an ID after an
--                          opening parenthesis
-- ARGV[2]  last    str     end of the range, in the same form
-- ARGV[3]  count   int     maximum number of entries to return
-- ARGV[4]  newest  flag    1 to read from the newest entry to the oldest
--
-- Returns  OK  the page is returned
--              [2] entries, each with its ID and fields
--              [3] 1 if there may be more entries
--
-- Cost     O(log n + count), where n is the number of entries. After the first 512 KiB, the script
--          reads up to eight more bodies, and returns at most one of them
-- Repeat   safe, because the script only reads
-- @include _byte_limit
-- @include _ids

local stream, first, last = KEYS[1], ARGV[1], ARGV[2]
local count, newest = tonumber(ARGV[3]), ARGV[4]

local command = newest == '1' and 'XREVRANGE' or 'XRANGE'

-- Number of entries per read. It is small, so that few bodies are copied beyond the byte limit.
local AT_ONCE = 8

local entries, n, bytes, more = {}, 0, 0, true
while more and n < count and bytes < BYTES_MAX do
  local some = math.min(AT_ONCE, count - n)
  local found = redis.call(command, stream, first, last, 'COUNT', some)
  more = #found == some
  for at = 1, #found do
    if bytes >= BYTES_MAX then
      more = true
      break
    end
    n = n + 1
    entries[n] = found[at]
    bytes = bytes + fields_size(found[at][2])
  end
  local id = n > 0 and entries[n][1]
  first = id and '(' .. id
  -- No range can start after the greatest ID.
  more = more and (newest == '1' or id ~= LAST_ID)
end
return {'OK', entries, more and 1 or 0}
