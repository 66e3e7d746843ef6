-- group_ensure: absent -> present, for a group on a partition and on its retry stream
--
-- Create a group on a partition and on its retry stream if it does not exist there. A new group
-- starts at `start`.
--
-- A group that existed before can be lost, for example when another client destroys it or deletes
-- its stream. The script then creates the group at its floor, which is the oldest message that the
-- group had not finished when the partition was last trimmed. The group may therefore receive
-- finished messages again, but does not skip an unfinished one. Because Redis stores the last entry
-- that a group has read, the script sets the position to the ID before the floor.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry   STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  trim    HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  group   str     consumer group
-- ARGV[2]  start   str     where a new group starts: 0 for the first retained message, or $ to
--                          start after the last one
--
-- Returns  OK       the group exists on the partition; if it was missing on the retry stream, it
--                   was created there
-- Returns  CREATED  the group was created on the partition
--                   [2] ID after which it starts
--
-- Cost     O(g), where g is the number of groups of the partition
-- Repeat   idempotent: the second call returns OK. If the group exists, the script writes nothing,
--          so it works when memory is full
-- @include _groups
-- @include _ids
-- @include _numbers

local stream, retry, trim = KEYS[1], KEYS[2], KEYS[3]
local group, start = ARGV[1], ARGV[2]

local on_stream = read_group(stream, group)
local on_retry = read_group(retry, group)
local floor = redis.call('HGET', trim, 'floor:' .. group)
if not on_stream and floor and not is_id(floor) then
  return bad_value(trim, 'floor:' .. group, 'the id of an entry')
end
local at = is_id(floor) and predecessor(floor) or start

-- No writes above this line
if not on_retry then
  redis.call('XGROUP', 'CREATE', retry, group, '0', 'MKSTREAM')
end
if on_stream then
  return {'OK'}
end
redis.call('XGROUP', 'CREATE', stream, group, at, 'MKSTREAM')
return {'CREATED', read_group(stream, group)['last-delivered-id']}
