-- group_ensure: absent -> present, for a group on a partition and on its retry stream
--
-- Create a group if it does not exist. A new group starts at `start`. A lost group (destroyed, or
-- its stream was deleted) starts just before the oldest message that it had not finished when the
-- partition was last trimmed. A group's position is exclusive, so this is the predecessor of its
-- floor.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry   STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  trim    HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  group   str     consumer group
-- ARGV[2]  start   str     0 = every retained message, $ = only later ones
--
-- Returns  OK       it exists (its retry side may have been repaired)
-- Returns  CREATED  created on the partition      [2] id after which it starts
--
-- Cost     O(g), g = groups of the partition
-- Repeat   idempotent: the second call returns OK. Writes nothing if the group exists, so memory
--          may be full
-- @include _groups
-- @include _ids
-- @include _numbers

local stream, retry, trim = KEYS[1], KEYS[2], KEYS[3]
local group, start = ARGV[1], ARGV[2]

local on_stream = group_on(stream, group)
local on_retry = group_on(retry, group)
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
return {'CREATED', group_on(stream, group)['last-delivered-id']}
