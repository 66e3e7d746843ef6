-- sink_start: unknown batch -> decided
--
-- Decide which task attempts make up a batch of a streaming query. Spark may repeat a batch with
-- other tasks, but only one set of rows may be published. The first decision therefore stays until
-- the whole batch is published, and a later call with other attempts gets the first decision.
--
-- KEYS[1]  record  HASH  streaming:mq:sink:{Q}
--
-- ARGV[1]  batch   int   number of the batch; the numbers of a query increase
-- ARGV[2]  plan    str   the decision as JSON: the attempts, and the partitions for which they
--                        staged rows
-- ARGV[3]  ttl_ms  int   how long the record is kept, from this call
-- ARGV[4]  rows    int   number of rows in the plan
-- ARGV[5]  topics  str   names of the topics to which the rows go, separated by spaces
--
-- Returns  OK       the batch was decided
--                   [2] number of the previous batch, or ''
-- Returns  STARTED  a decision for this batch or an earlier one is not carried out yet
--                   [2] number of the decided batch
--                   [3] plan of that batch
-- Returns  DONE     the batch is already published
--                   [2] number of its rows
--                   [3] names of its topics, or '' if they are unknown
-- Returns  PAST     a later batch was already decided
--                   [2] number of that batch
--
-- Cost     O(1) plus the size of the plan
-- Repeat   idempotent: the second call returns STARTED with the first decision. The script works
--          when memory is full
-- @include _numbers

local record = KEYS[1]
local batch, plan, ttl_ms, rows, topics = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local at = redis.call('HGET', record, 'batch')
if at then
  local last, current = to_int(at), tonumber(batch)
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
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
-- The batch must be able to continue at that time, because its staged rows take memory until they
-- are published.
redis.call('HDEL', record, 'plan')
redis.call('HSET', record, 'batch', batch, 'plan', plan, 'rows', rows, 'topics', topics)
redis.call('PEXPIRE', record, ttl_ms)
return {'OK', at or ''}
