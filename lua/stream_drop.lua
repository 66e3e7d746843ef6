-- stream_drop: unsettled, beyond a limit that allows the loss -> gone, counted
--
-- Remove the oldest entries of a partition in whole nodes, even if a group has not read or finished
-- them. Call this script only for a topic whose settings explicitly allow this loss. If the topic
-- requires an archive, entries that are not archived stay.
--
-- The script counts the entries that each group had not read. Removed entries that are pending for
-- a group stay pending, and are counted when `missing_settle` settles them.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]  trim         HASH    streaming:mq:trim:{T:p:i}    the record of trimming
--
-- ARGV[1]  drop_before  id      remove the entries before this ID, or 0-0 to remove none for their
--                               age
-- ARGV[2]  max_len      int     maximum number of entries to keep, or -1 for no limit
-- ARGV[3]  archive      flag    1 to keep entries that are not archived
-- ARGV[4]  limit        int     maximum number of entries to remove, at least 1. The script also
--                               stops after 16 MiB, but removes at least one node, or 512 KiB of
--                               one node if its entries must be counted
-- ARGV[5..] expected    list    groups that must exist
--
-- Returns  OK             the entries were removed
--                         [2] number of entries removed
--                         [3] for each group: its name, and the number of removed entries that it
--                         had not read
-- Returns  NO_GROUPS      no group reads the stream, or the stream does not exist, so nothing was
--                         removed
-- Returns  MISSING_GROUP  an expected group does not exist, so nothing was removed
--                         [2] name of that group
--
-- Cost     O(g x (log n + b) + limit), where g is the number of groups, n the number of pending
--          entries, and b the size of a node. While no entry is beyond the limits, the cost is O(g)
-- Repeat   safe: a second call removes the next entries beyond the limits. The script works when
--          memory is full
-- @include _byte_limit
-- @include _groups
-- @include _ids
-- @include _ranges
-- @include _counting
-- @include _numbers
-- @include _nodes
-- @include _lists
-- @include _floors
-- @include _record

local stream, trim = KEYS[1], KEYS[2]
local drop_before, max_len, archive = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local limit, expected = tonumber(ARGV[4]), slice(ARGV, 5, #ARGV)

local groups = read_groups(stream)
if #groups == 0 then
  return {'NO_GROUPS'}
end
local missing = find_missing_group(groups, expected)
if missing then
  return {'MISSING_GROUP', missing}
end
local info = to_table(redis.call('XINFO', 'STREAM', stream))
local ceiling = archive_ceiling(trim, archive, info['last-generated-id'])
local by_age = earlier(drop_before, ceiling)
local length, record = info['length'], {}
lowest_floor(stream, groups, record)
table.sort(groups, function(a, b)
  return older(a['last-delivered-id'], b['last-delivered-id'])
end)

-- No writes above this line
local removed = 0
-- Remove entries before an ID, as far as the limits of age and length require.
local function remove_before(before)
  if removed < limit and not stopped then
    local most, age = removed == 0 and length or 0, earlier(by_age, before)
    removed = removed + remove_nodes(stream, info, age, limit - removed, most)
  end
  local excess = max_len >= 0 and length - removed - max_len or 0
  local room = math.min(excess, limit - removed)
  if room > 0 and not stopped then
    local upto, most = earlier(ceiling, before), removed == 0 and excess or 0
    removed = removed + remove_nodes(stream, info, upto, room, most)
  end
end

-- Visit the groups in the order of their positions. A group has not read the entries removed after
-- its turn, except the read entries in the node that contains its position. At its turn, these are
-- counted, as far as age or length may still remove them. If they are too many to copy in one call,
-- a call that has not removed anything yet removes only the counted ones and stops there, and later
-- calls continue.
local unread, crowded = {}, false
for at, group in ipairs(groups) do
  local read = group['last-delivered-id']
  if not crowded then
    remove_before(successor(read))
  end
  unread[at] = {removed, 0}
  local first = not (crowded or stopped) and redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local excess = math.max(0, max_len >= 0 and length - removed - max_len or 0)
  local aged = first and older(first[1], by_age)
  if first and removed < limit and (aged or excess > 0) then
    local most = aged and length or excess
    local upto = excess > 0 and read or earlier(read, by_age)
    local count, last, more = count_after(stream, '0-0', upto, most)
    crowded = more and count < most and last ~= upto
    if crowded and removed == 0 then
      local before = earlier(count > excess and by_age or ceiling, successor(last))
      removed = redis.call('XTRIM', stream, 'MINID', '=', before)
    end
    unread[at] = {removed, count}
  end
end
if not crowded then
  remove_before(ceiling)
end
local dropped = {}
for at, group in ipairs(groups) do
  local lost = math.max(0, removed - unread[at][1] - unread[at][2])
  dropped[2 * at - 1], dropped[2 * at] = group['name'], lost
  if lost > 0 then
    increment(trim, 'dropped_unread:' .. group['name'], lost)
  end
end
if removed > 0 then
  note_trim(stream, trim, removed, record)
end
return {'OK', removed, dropped}
