-- growth_finish: settling -> fixed partition count
--
-- Delete the record of a growth. The caller does this when every group that took part in the growth
-- reads the new partitions.
--
-- KEYS[1]  meta   HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  token  token  token of the growth
--
-- Returns  OK    the record was deleted
-- Returns  GONE  no growth with this token is in progress
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns GONE. The script works when memory is full

local meta = KEYS[1]
local token = ARGV[1]

if redis.call('HGET', meta, 'growToken') ~= token then
  return {'GONE'}
end

-- No writes above this line
redis.call('HDEL', meta, 'growTo', 'growToken', 'growFrom', 'growSince', 'growBarriers')
return {'OK'}
