-- sink_begin: a batch that nothing is known of -> decided
--
-- Decide which attempts of its tasks make up a batch of a streaming query. The decision stays until
-- all of it is published: who comes later with other attempts is told the first one.
--
-- KEYS[1]  record  HASH  streaming:mq:sink:{Q}
--
-- ARGV[1]  batch   int   number of the batch; a query's batches grow
-- ARGV[2]  plan    str   JSON: which attempts, and to which partitions they have staged rows
-- ARGV[3]  ttl_ms  int   how long the record is kept from now
-- ARGV[4]  rows    int   how many rows the plan has
-- ARGV[5]  topics  str   names of their topics, with spaces between them
--
-- Returns  OK     decided                       [2] number of the batch before, or ''
-- Returns  BEGUN  a decision is not carried out yet, of this batch or one before
--                 [2] number of that batch [3] its plan
-- Returns  DONE   the batch is published       [2] its rows [3] its topics, '' = not known
-- Returns  PAST   a later batch was decided     [2] its number
--
-- Cost     O(1) + size of the plan
-- Repeat   safe: the second answers BEGUN with what the first has decided. Works when memory is full
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
  local begun = redis.call('HGET', record, 'plan')
  if begun then
    return {'BEGUN', at, begun}
  end
  if last == current then
    local known = redis.call('HMGET', record, 'rows', 'topics')
    return {'DONE', known[1] or '', known[2] or ''}
  end
end

-- Guards end here
-- HDEL first: accepted when memory is full, and so is every write behind it. What is staged takes
-- memory until it is published.
redis.call('HDEL', record, 'plan')
redis.call('HSET', record, 'batch', batch, 'plan', plan, 'rows', rows, 'topics', topics)
redis.call('PEXPIRE', record, ttl_ms)
return {'OK', at or ''}
