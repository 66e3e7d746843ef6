-- stream_step: read-only
--
-- Return the position `count` entries after another. A stream has no ranks, so entries must be
-- counted. Counting them in a script transfers no body.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  after   id      position, exclusive. 0-0 is before every entry
-- ARGV[2]  upto    id      do not go beyond this id
-- ARGV[3]  count   int     maximum number of entries to advance, 500 or less; callers take several
--                          steps
--
-- Returns  OK  [2] entries advanced [3] id of the last entry, or `after` if there was none [4] 1 =
--              there may be more before `upto`
--
-- Cost     O(count x log n) + at most 512 KiB of bodies plus four more, n = entries
-- Repeat   safe: read-only
-- @include _byte_limit
-- @include _ids
-- @include _ranges
-- @include _counting

local stream = KEYS[1]
local after, upto, count = ARGV[1], ARGV[2], tonumber(ARGV[3])

local gone, last, more = count_after(stream, after, upto, count)
return {'OK', gone, last, more and 1 or 0}
