-- message_adopt: in-flight (other clients) -> in-flight (streamqd)
--
-- Take over one page of the entries that other clients have read from a group and not acknowledged.
-- An operator does this to move a group from other clients to streamqd, while no instance owns the
-- assignment. The first owner then recovers these entries. If the group does not exist, the script
-- raises NOGROUP, as a read would.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  source  STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  group   str     consumer group
-- ARGV[2]  cursor  id      start of the page, which is 0-0 for the first one
-- ARGV[3]  count   int     maximum number of entries to take over
--
-- Returns  OK    the entries were taken over
--                [2] cursor of the next page, or 0-0 after the last one
--                [3] number of entries taken over
-- Returns  HELD  an instance of streamqd owns the assignment, so nothing was taken over
--                [2] epoch
--                [3] owner
--
-- Cost     O(count x log n), where n is the number of pending entries
-- Repeat   safe: a second call takes over the same entries again. The script works when memory is
--          full
-- @include _groups

local fence, source = KEYS[1], KEYS[2]
local group, cursor, count = ARGV[1], ARGV[2], ARGV[3]

local held = redis.call('HMGET', fence, 'token', 'epoch', 'owner')
if held[1] then
  return {'HELD', held[2] or '0', held[3] or ''}
end
if not read_group(source, group) then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. source)
end

-- No writes above this line
local page = redis.call('XAUTOCLAIM', source, group, 'w', 0, cursor, 'COUNT', count, 'JUSTID')
return {'OK', page[1], #page[2]}
