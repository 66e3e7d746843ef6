-- stream_step: no transition, reads only
--
-- Where a reader stands who goes so many entries on. A stream has no ranks, so somebody must count;
-- here no body travels.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}, or its :dlq
--
-- ARGV[1]  after   id      position, exclusive; 0-0 is before every entry
-- ARGV[2]  upto    id      do not go beyond this one
-- ARGV[3]  count   int     how many entries to go, 1000 at most: callers take more in several steps
--
-- Returns  OK  [2] entries gone, less than asked when `upto` came first [3] id of the last of them,
--              `after` when there was none
--
-- Cost     O(log n + count x size of a body), n = entries
-- Repeat   safe: reads only

local stream = KEYS[1]
local after, upto, count = ARGV[1], ARGV[2], ARGV[3]

local page = redis.call('XRANGE', stream, '(' .. after, upto, 'COUNT', count)
return {'OK', #page, #page > 0 and page[#page][1] or after}
