-- growth_finish: settling -> fixed partition count
--
-- Remove the record of a growth. Every group that existed at its start now reads the new
-- partitions.
--
-- KEYS[1]  meta   HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  token  token  of the growth
--
-- Returns  OK    removed
-- Returns  GONE  no such growth is in progress
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns GONE. Works when memory is full

local meta = KEYS[1]
local token = ARGV[1]

if redis.call('HGET', meta, 'growToken') ~= token then
  return {'GONE'}
end

-- No writes above this line
redis.call('HDEL', meta, 'growTo', 'growToken', 'growFrom', 'growSince', 'growBarriers')
return {'OK'}
