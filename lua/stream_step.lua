-- stream_step: read-only
--
-- Return the position that is `count` entries after another one. A stream has no ranks, so the
-- entries must be counted. The script counts them inside the server, so no body is transferred to
-- the client.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  after   id      position after which the step starts. 0-0 is before every entry
-- ARGV[2]  upto    id      do not go beyond this ID
-- ARGV[3]  count   int     maximum number of entries to advance, at most 500. Callers make several
--                          steps to advance further
--
-- Returns  OK  the position was advanced
--              [2] number of entries passed
--              [3] ID of the last one, or `after` if there was none
--              [4] 1 if there may be more entries before `upto`
--
-- Cost     O(count x log n), where n is the number of entries. The script reads at most 512 KiB of
--          bodies plus four more
-- Repeat   safe, because the script only reads
-- @include _byte_limit
-- @include _ids
-- @include _ranges
-- @include _counting

local stream = KEYS[1]
local after, upto, count = ARGV[1], ARGV[2], tonumber(ARGV[3])

local gone, last, more = count_after(stream, after, upto, count)
return {'OK', gone, last, more and 1 or 0}
