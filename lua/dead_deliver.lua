-- dead_deliver: moving -> ready
--
-- Write a dead letter that moves to another slot into its new stream, once. Its dedup id is
-- remembered for `window_ms`, so that an interrupted move can be repeated.
--
-- KEYS[1]  target     STREAM  stream:topic:{T:p:i}:retry:G, or stream:topic:{T:p:i}
-- KEYS[2]  dedup      STRING  streaming:mq:dedup:{T:p:i}:<id>
--
-- ARGV[1]  group      str     group of the target retry stream, '' = the target is the partition
-- ARGV[2]  window_ms  int     how long the dedup id is remembered
-- ARGV[3..] fields    list    names and values of the whole entry
--
-- Returns  OK         written                          [2] id
-- Returns  DUPLICATE  already written with this dedup id  [2] id of that entry
-- Returns  NOGROUP    the group does not exist on its retry stream
--
-- Cost     O(1) + size of the body
-- Repeat   safe within the window: the second call returns DUPLICATE
-- @include _groups
-- @include _lists

local target, dedup = KEYS[1], KEYS[2]
local group, window_ms, fields = ARGV[1], ARGV[2], slice(ARGV, 3, #ARGV)

local earlier = redis.call('GET', dedup)
if earlier then
  return {'DUPLICATE', earlier}
end
if group ~= '' and not group_on(target, group) then
  return {'NOGROUP'}
end
redis.call('XLEN', target)

-- No writes above this line
local id = redis.call('XADD', target, '*', unpack(fields))
redis.call('SET', dedup, id, 'PX', window_ms)
return {'OK', id}
