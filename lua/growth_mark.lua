-- growth_mark: grown -> settling
--
-- Store the barriers of a growth: the last ID of each old partition. A group may read the new
-- partitions when it has settled all entries of the old partitions up to these barriers. The caller
-- reads the IDs after producers were switched, so no entry after a barrier was routed by the old
-- count. If barriers are already stored, the script keeps them, so that all callers use the same
-- ones.
--
-- KEYS[1]  meta      HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  token     token  token of the growth
-- ARGV[2]  barriers  str    last ID of each old partition, in their order, separated by spaces
--
-- Returns  OK    the barriers are stored, by this call or an earlier one
--                [2] the stored barriers
-- Returns  GONE  no growth with this token is in progress, or producers are not switched yet
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
