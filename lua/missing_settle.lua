-- missing_settle: in-flight, entry missing -> settled, counted
--
-- Settle the pending entries of a group that are no longer in the partition. Partitions are trimmed
-- from the old end only, so an entry older than the first one never comes back. Call this only for
-- a topic that may drop unsettled entries. In any other topic, an entry is missing because another
-- client trimmed the stream. Its owner may still have the body, and settles it.
--
-- KEYS[1]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[2]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[3]  trim      HASH    streaming:mq:trim:{T:p:i}       the record
--
-- ARGV[1]  group     str     consumer group
-- ARGV[2]  count     int     at most this many
--
-- Returns  OK       [2] settled; fewer than count = there are no more
-- Returns  NOGROUP  the group does not exist on the partition
--
-- Cost     O(g + count x log n), g = groups, n = pending entries
-- Repeat   safe: settles the next ones. Works when memory is full, except for the counter
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
