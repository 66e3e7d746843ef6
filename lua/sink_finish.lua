-- sink_finish: decided -> published
--
-- Record that a batch of a streaming query is published, because all its rows are in their
-- partitions. The batch is never published again.
--
-- KEYS[1]  record  HASH  streaming:mq:sink:{Q}
--
-- ARGV[1]  batch   int   number of the batch
-- ARGV[2]  ttl_ms  int   how long the record is kept, from this call
--
-- Returns  OK     the batch is recorded as published
-- Returns  OTHER  the record belongs to another batch, or does not exist
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns OK. The script works when memory is full

local record = KEYS[1]
local batch, ttl_ms = ARGV[1], ARGV[2]

if redis.call('HGET', record, 'batch') ~= batch then
  return {'OTHER'}
end

-- No writes above this line
redis.call('HDEL', record, 'plan')
redis.call('PEXPIRE', record, ttl_ms)
return {'OK'}
