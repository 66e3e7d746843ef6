-- missing_settle: in-flight, entry missing -> settled, counted
--
-- Settle pending entries of a group that are no longer in the partition, and count them as dropped.
-- A partition is trimmed from its old end only, so an entry that is older than the first one never
-- comes back.
--
-- Call this script only for a topic that is allowed to drop unsettled entries. In any other topic,
-- an entry is missing because another client has trimmed the stream. The owner may then still have
-- its body, and settles the entry itself.
--
-- KEYS[1]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[2]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[3]  trim      HASH    streaming:mq:trim:{T:p:i}    counts the dropped entries
--
-- ARGV[1]  group     str     consumer group
-- ARGV[2]  count     int     settle at most this many entries
--
-- Returns  OK       settled
--                   [2] number of entries settled; if it is smaller than `count`, there are no more
-- Returns  NOGROUP  the group does not exist on the partition
--
-- Cost     O(g + count x log n); g = groups, n = pending entries
-- Repeat   safe: a second call settles the next entries. Works when memory is full, except that the
--          entries may then not be counted
-- @include _groups
-- @include _lists
-- @include _places
-- @include _numbers

local stream, attempts, trim = KEYS[1], KEYS[2], KEYS[3]
local group, count = ARGV[1], tonumber(ARGV[2])

if not group_on(stream, group) then
  return {'NOGROUP'}
end
local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
local before = first and '(' .. first[1] or '+'
local rows = redis.call('XPENDING', stream, group, '-', before, count)
redis.call('HLEN', attempts)
redis.call('HLEN', trim)

-- No writes above this line
local ids, places = {}, {}
for at, row in ipairs(rows) do
  ids[at], places[at] = row[1], 'm:' .. row[1]
end
forget_all_attempts(attempts, places)
local settled = acknowledge(stream, group, ids)
if settled > 0 then
  count_on(trim, 'dropped_pending:' .. group, settled)
end
return {'OK', settled}
