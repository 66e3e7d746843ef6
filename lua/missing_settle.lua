-- missing_settle: in-flight, entry missing -> settled, counted
--
-- Settle pending entries of a group that are no longer in the partition, and count them as dropped.
-- A partition is trimmed from its old end only, so an entry that is older than the first one never
-- comes back.
--
-- Call this script only for a topic that is allowed to drop unsettled entries. In any other topic,
-- an entry is missing because another client has trimmed the stream. The owner may still have the
-- body of such an entry, and settles the entry itself.
--
-- KEYS[1]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[2]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[3]  trim      HASH    streaming:mq:trim:{T:p:i}    counts the dropped entries
--
-- ARGV[1]  group     str     consumer group
-- ARGV[2]  count     int     maximum number of entries to settle
--
-- Returns  OK       the entries were settled
--                   [2] number of entries settled. If it is smaller than `count`, no more entries
--                   are missing
-- Returns  NOGROUP  the group does not exist on the partition
--
-- Cost     O(g + count x log n), where g is the number of groups and n the number of pending
--          entries
-- Repeat   safe: a second call settles the next entries. The script works when memory is full, but
--          may then not count the entries
-- @include _groups
-- @include _lists
-- @include _places
-- @include _numbers

local stream, attempts, trim = KEYS[1], KEYS[2], KEYS[3]
local group, count = ARGV[1], tonumber(ARGV[2])

if not read_group(stream, group) then
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
  increment(trim, 'dropped_pending:' .. group, settled)
end
return {'OK', settled}
