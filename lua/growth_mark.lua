-- growth_mark: grown -> settling
--
-- Keep what each group has to settle on the old partitions before it may read the new ones. Read
-- after the switch, so that nothing behind it was routed by the old count; the first marks stay.
--
-- KEYS[1]  meta      HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  token     token  that of the growth
-- ARGV[2]  barriers  str    the last id of each old partition, in their order, with blanks between
--
-- Returns  OK    [2] the barriers that hold
-- Returns  GONE  no such growth is under way, or it is not switched
--
-- Cost     O(1)
-- Repeat   safe: the second answers the first's barriers

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

-- Guards end here
redis.call('HSET', meta, 'growBarriers', barriers)
return {'OK', barriers}
