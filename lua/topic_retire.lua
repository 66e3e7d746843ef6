-- topic_retire: present -> being deleted
--
-- Start the deletion of a topic. From this call on, clients see no partitions of the topic, and it
-- cannot be created again. The field `deleting` keeps the partition count for the process that
-- removes the other keys of the topic. The deletion is complete when that process removes this key
-- too.
--
-- KEYS[1]  meta  HASH  streaming:mq:topic:{T}:meta
--
-- Returns  OK       the deletion has started
--                   [2] partition count of the topic
-- Returns  MISSING  the topic does not exist
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns the same partition count. The script works when
--          memory is full

local meta = KEYS[1]

local known = redis.call('HMGET', meta, 'partitionCount', 'deleting')
local count = known[2] or known[1]
if not count then
  return {'MISSING'}
end

-- No writes above this line
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', meta, 'partitionCount')
redis.call('HSET', meta, 'deleting', count)
return {'OK', count}
