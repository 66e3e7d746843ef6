-- topic_retire: present -> being deleted
--
-- From here on the topic has no partitions for anybody who asks, and cannot be created. `deleting`
-- keeps their number, for whoever removes what is left; the removal of the whole key ends it.
--
-- KEYS[1]  meta  HASH  streaming:mq:topic:{T}:meta
--
-- Returns  OK       [2] number of partitions
-- Returns  MISSING  there is no such topic
--
-- Cost     O(1)
-- Repeat   safe: the second answers the same. Works when memory is full

local meta = KEYS[1]

local known = redis.call('HMGET', meta, 'partitionCount', 'deleting')
local count = known[2] or known[1]
if not count then
  return {'MISSING'}
end

-- Guards end here
-- HDEL first: accepted when memory is full, and so is every write behind it.
redis.call('HDEL', meta, 'partitionCount')
redis.call('HSET', meta, 'deleting', count)
return {'OK', count}
