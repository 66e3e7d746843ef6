-- growth_end: settling -> settled count
--
-- Forget a growth: every group that was there when it began reads the new partitions.
--
-- KEYS[1]  meta   HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  token  token  that of the growth
--
-- Returns  OK    ended
-- Returns  GONE  no such growth is under way: success for a repeat
--
-- Cost     O(1)
-- Repeat   safe: the second answers GONE. Works when memory is full

local meta = KEYS[1]
local token = ARGV[1]

if redis.call('HGET', meta, 'growToken') ~= token then
  return {'GONE'}
end

-- Guards end here
redis.call('HDEL', meta, 'growTo', 'growToken', 'growFrom', 'growSince', 'growBarriers')
return {'OK'}
