-- sink_start: unknown batch -> decided
--
-- Decide which task attempts make up a batch of a streaming query. The decision stays until the
-- whole batch is published. A later call with other attempts gets the first decision.
--
-- KEYS[1]  record  HASH  streaming:mq:sink:{Q}
--
-- ARGV[1]  batch   int   batch number. The numbers of a query grow
-- ARGV[2]  plan    str   JSON: the attempts, and the partitions for which they staged rows
-- ARGV[3]  ttl_ms  int   how long the record is kept from now
-- ARGV[4]  rows    int   number of rows in the plan
-- ARGV[5]  topics  str   names of their topics, separated by spaces
--
-- Returns  OK     decided                       [2] number of the previous batch, or ''
-- Returns  STARTED  a decision is not carried out yet, for this batch or an earlier one
--                 [2] number of that batch [3] its plan
-- Returns  DONE   the batch is published        [2] its rows [3] its topics, '' = unknown
-- Returns  PAST   a later batch was decided     [2] its number
--
-- Cost     O(1) + size of the plan
-- Repeat   idempotent: the second call returns STARTED with the first decision. Works when memory
--          is full
-- @include _numbers

local record = KEYS[1]
local batch, plan, ttl_ms, rows, topics = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local at = redis.call('HGET', record, 'batch')
if at then
  local last, current = whole(at), tonumber(batch)
  if not last then
    return bad_value(record, 'batch', 'the number of a batch')
  end
  if last > current then
    return {'PAST', at}
  end
  local started = redis.call('HGET', record, 'plan')
  if started then
    return {'STARTED', at, started}
  end
  if last == current then
    local known = redis.call('HMGET', record, 'rows', 'topics')
    return {'DONE', known[1] or '', known[2] or ''}
  end
end

-- No writes above this line
-- HDEL first: it is accepted when memory is full, and so is every write after it. Staged rows take
-- memory until they are published.
redis.call('HDEL', record, 'plan')
redis.call('HSET', record, 'batch', batch, 'plan', plan, 'rows', rows, 'topics', topics)
redis.call('PEXPIRE', record, ttl_ms)
return {'OK', at or ''}
