-- stream_trim: settled and no longer retained -> gone
--
-- Remove the oldest entries of a stream in whole nodes, but keep every entry that a group still has
-- to finish. The limits apply independently of each other: an entry is removed when it exceeds any
-- one of them.
--
-- The floor is the smallest ID that must stay. For a group, this is its first pending entry or, if
-- it has none, the ID after the last entry delivered to it. A group that only shows the position of
-- a Spark query counts only if the query asked for it. The script computes the floor and trims in
-- one step. If a client computed the floor, it could be wrong by the time of the trim, because a
-- group could be created or reset in between, or the server could fail over.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:retry:G
-- KEYS[2]? trim       HASH    streaming:mq:trim:{T:p:i}    the record of trimming, none for a retry
--                                                          stream
--
-- ARGV[1]  keep_from  id      ID from which entries are kept, or '' for no age limit
-- ARGV[2]  max_len    int     maximum number of entries to keep, or -1 for no limit
-- ARGV[3]  max_bytes  int     approximate number of bytes to keep, or -1 for no limit
-- ARGV[4]  shrink_ms  int     length of an interval, or -1 for none. At the end of each interval,
--                             the entries that already existed at its start are removed. This
--                             requires the record of trimming
-- ARGV[5]  archive    flag    1 to keep entries that are not archived
-- ARGV[6]  groupless  flag    1 to also trim a stream that no group reads
-- ARGV[7]  limit      int     maximum number of entries to remove, at least 1. The script also
--                             stops after approximately 16 MiB, but removes at least one node
-- ARGV[8..] expected  list    groups that must exist
--
-- Returns  OK             the stream was trimmed
--                         [2] number of entries removed
--                         [3] floor of the stream
--                         [4] name of the group that determines the floor, @archive if the archive
--                         does, or '' if no entry is needed
--                         [5] first entry that a limit would remove and that is kept only for this
--                         group or archive, or ''
--                         [6] 1 if there may be more entries to remove
-- Returns  NO_GROUPS      no group reads the stream, or the stream does not exist, so nothing was
--                         removed
-- Returns  MISSING_GROUP  an expected group does not exist, so nothing was removed
--                         [2] name of that group
--
-- Cost     O(g x log n + limit) plus the size of five bodies, where g is the number of groups and n
--          the number of pending entries. With `max_bytes`, the script also measures 1,000 nodes,
--          which takes approximately 0.1 ms
-- Repeat   safe: a second call removes the next entries. The script works when memory is full
-- @include _clock
-- @include _byte_limit
-- @include _groups
-- @include _ids
-- @include _numbers
-- @include _nodes
-- @include _lists
-- @include _floors
-- @include _record

local stream, trim = KEYS[1], KEYS[2]
local keep_from, max_len, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local shrink_ms, archive, groupless = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local limit, expected = tonumber(ARGV[7]), slice(ARGV, 8, #ARGV)

local recorded = trim ~= stream
local groups = read_groups(stream)
groups = recorded and keeping_groups(groups, trim) or groups
local length = redis.call('XLEN', stream)
if #groups == 0 and (groupless == '0' or length == 0) then
  return {'NO_GROUPS'}
end
local missing = find_missing_group(groups, expected)
if missing then
  return {'MISSING_GROUP', missing}
end

local info = to_table(redis.call('XINFO', 'STREAM', stream))
local last = info['last-generated-id']
local record = {}
local floor, holder = lowest_floor(stream, groups, record)
local archived = recorded and redis.call('HGET', trim, 'archived')
if archive == '1' and archived and not is_id(archived) then
  return bad_value(trim, 'archived', 'the id of an entry')
end
if archive == '1' and (not floor or older(archive_floor(archived), floor)) then
  floor, holder = archive_floor(archived), '@archive'
end
floor, holder = floor or successor(last), holder or ''

local keep = keep_from == '' and successor(last) or keep_from
if shrink_ms >= 0 then
  local known = redis.call('HMGET', trim, 'shrunk', 'shrink_from', 'shrink_next')
  -- If a value cannot be read, the interval starts again, so entries only stay longer.
  local now, from = now_unix_ms(), is_id(known[2]) and known[2] or '0-0'
  local shrunk = known[1] and to_int(known[1])
  local since = shrunk and now - shrunk
  if not since or since < 0 or since >= shrink_ms then
    from = is_id(known[3]) and known[3] or '0-0'
    record['shrunk'], record['shrink_from'] = text(now), from
    record['shrink_next'] = successor(last)
  end
  if older(keep, from) then
    keep = from
  end
end
if max_bytes >= 0 and length > 0 then
  -- Compute how many of the newest entries take approximately max_bytes, if sizes are similar.
  local used = redis.call('MEMORY', 'USAGE', stream, 'SAMPLES', 1000)
  local fitting = math.floor(length * math.min(1, max_bytes / used))
  max_len = (max_len < 0 or fitting < max_len) and fitting or max_len
end

-- No writes above this line
-- XTRIM is first because Redis accepts it when memory is full, and then accepts later writes too.
-- With `~`, it removes only whole nodes, because removing part of a node would free nothing. These
-- include a partly filled last node if all its entries may be removed.
local below = older(keep, floor) and keep or floor
local removed = remove_nodes(stream, info, below, limit, length)
-- XTRIM must not be called with a LIMIT of 0, which means no limit.
local excess = max_len >= 0 and length - removed - max_len or 0
if math.min(excess, limit - removed) > 0 then
  local room = math.min(excess, limit - removed)
  local more = remove_nodes(stream, info, floor, room, removed == 0 and excess or 0)
  removed, excess = removed + more, excess - more
end
if recorded then
  note_trim(stream, trim, removed, record)
end
-- If the excess is smaller than a node, it remains because only whole nodes are removed, and not
-- because of the floor.
local node = math.max(NODE, length / math.max(1, info['radix-tree-keys']))
local beyond = older(floor, keep) or excess > node
local more = stopped or removed > 0 and 2 * removed >= limit
local held = not more and beyond and redis.call('XRANGE', stream, floor, '+', 'COUNT', 1)[1]
return {'OK', removed, floor, holder, held and held[1] or '', more and 1 or 0}
