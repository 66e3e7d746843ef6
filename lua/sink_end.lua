-- sink_end: decided -> published
--
-- All rows of a batch of a streaming query are in their partitions: it is never done again.
--
-- KEYS[1]  record  HASH  streaming:mq:sink:{Q}
--
-- ARGV[1]  batch   int   number of the batch
-- ARGV[2]  ttl_ms  int   how long the record is kept from now
--
-- Returns  OK     it is published
-- Returns  OTHER  the record is about another batch, or is gone
--
-- Cost     O(1)
-- Repeat   safe. Works when memory is full

local record = KEYS[1]
local batch, ttl_ms = ARGV[1], ARGV[2]

if redis.call('HGET', record, 'batch') ~= batch then
  return {'OTHER'}
end

-- Guards end here
redis.call('HDEL', record, 'plan')
redis.call('PEXPIRE', record, ttl_ms)
return {'OK'}
