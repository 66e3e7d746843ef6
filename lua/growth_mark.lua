-- growth_mark: grown -> settling
--
-- Store the barriers: the last entries that each group must settle on the old partitions before it
-- may read the new ones. They are read after the switch, so no entry after them was routed by the
-- old count. The first barriers stay.
--
-- KEYS[1]  meta      HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  token     token  of the growth
-- ARGV[2]  barriers  str    the last id of each old partition, in order, separated by spaces
--
-- Returns  OK    [2] the stored barriers
-- Returns  GONE  no such growth is in progress, or producers are not switched yet
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns the first barriers

local meta = KEYS[1]
local token, barriers = ARGV[1], ARGV[2]

local known = redis.call(
  'HMGET', meta, 'partitionCount', 'growTo', 'growToken', 'growBarriers')
if known[3] ~= token or known[1] ~= known[2] then
  return {'GONE'}
end
if known[4] then
  return {'OK', known[4]}
end

-- No writes above this line
redis.call('HSET', meta, 'growBarriers', barriers)
return {'OK', barriers}
