-- stream_step: no transition, reads only
--
-- Where a reader stands who goes so many entries on. A stream has no ranks, so somebody must count;
-- here no body travels.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}, or its :dlq
--
-- ARGV[1]  after   id      position, exclusive; 0-0 is before every entry
-- ARGV[2]  upto    id      do not go beyond this one
-- ARGV[3]  count   int     how many entries to go at most, 500 or less: callers take several steps
--
-- Returns  OK  [2] entries gone [3] id of the last of them, `after` when there was none
--              [4] 1 = there may be more, though `upto` has not come
--
-- Cost     O(count x log n) + 512 KiB of bodies at most and four more, n = entries
-- Repeat   safe: reads only
-- @include _bytes
-- @include _ids
-- @include _after
-- @include _count

local stream = KEYS[1]
local after, upto, count = ARGV[1], ARGV[2], tonumber(ARGV[3])

local gone, last, more = count_after(stream, after, upto, count)
return {'OK', gone, last, more and 1 or 0}
