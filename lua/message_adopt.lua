-- message_adopt: in-flight (foreign clients') -> in-flight (streamqd's)
--
-- Take over everything that a group's clients have read and not acknowledged, while no instance of
-- streamqd owns the unit: the first owner recovers it. Takes a page; the cursor goes on. A missing
-- group is the server's own error NOGROUP, as for a read.
--
-- KEYS[1]  fence   HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  source  STREAM  stream:topic:{T:p:i}, or its :retry:G
--
-- ARGV[1]  group   str     consumer group
-- ARGV[2]  cursor  id      where the page begins, 0-0 at first
-- ARGV[3]  count   int     at most this many
--
-- Returns  OK      [2] the next page's cursor, 0-0 at the end [3] how many this page took
-- Returns  HELD    somebody of streamqd owns the unit       [2] epoch [3] owner
--
-- Cost     O(count x log n)
-- Repeat   safe: what was taken is taken again
-- @include _groups

local fence, source = KEYS[1], KEYS[2]
local group, cursor, count = ARGV[1], ARGV[2], ARGV[3]

local held = redis.call('HMGET', fence, 'token', 'epoch', 'owner')
if held[1] then
  return {'HELD', held[2] or '0', held[3] or ''}
end
if not group_on(source, group) then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. source)
end

-- Guards end here
local page = redis.call('XAUTOCLAIM', source, group, 'w', 0, cursor, 'COUNT', count, 'JUSTID')
return {'OK', page[1], #page[2]}
