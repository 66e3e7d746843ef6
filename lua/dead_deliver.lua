-- dead_deliver: moving -> ready
--
-- Write a dead letter to its new stream, if that stream is in another slot than the dead letter.
-- Because one script cannot use the keys of two slots, such a move consists of three calls:
-- `dead_mark` records the destination, this script writes the message, and `dead_purge` deletes the
-- dead letter. A move that was interrupted is repeated, so this script may be called twice for one
-- dead letter. To prevent a second copy of the message, it writes the message and its deduplication
-- ID in one step. A second call within `window_ms` finds the deduplication ID and writes nothing.
--
-- KEYS[1]  target     STREAM  stream:topic:{T:p:i}:retry:G, or stream:topic:{T:p:i}
-- KEYS[2]  dedup      STRING  streaming:mq:dedup:{T:p:i}:<id>
--
-- ARGV[1]  group      str     group to whose retry stream the message is written, or '' to write it
--                             to the partition
-- ARGV[2]  window_ms  int     how long the deduplication ID is remembered
-- ARGV[3..] fields    list    names and values of all fields of the entry
--
-- Returns  OK         the message was written
--                     [2] ID of the new entry
-- Returns  DUPLICATE  an earlier call has written the message
--                     [2] ID of the entry that it wrote
-- Returns  NOGROUP    the group does not exist on the retry stream, so nothing was written
--
-- Cost     O(1) plus the size of the body
-- Repeat   safe within the window: the second call returns DUPLICATE
-- @include _groups
-- @include _lists

local target, dedup = KEYS[1], KEYS[2]
local group, window_ms, fields = ARGV[1], ARGV[2], slice(ARGV, 3, #ARGV)

local earlier = redis.call('GET', dedup)
if earlier then
  return {'DUPLICATE', earlier}
end
if group ~= '' and not read_group(target, group) then
  return {'NOGROUP'}
end
redis.call('XLEN', target)

-- No writes above this line
local id = redis.call('XADD', target, '*', unpack(fields))
redis.call('SET', dedup, id, 'PX', window_ms)
return {'OK', id}
