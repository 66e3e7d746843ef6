-- outbox_fence: epoch of an earlier relay -> epoch of this relay
--
-- Close a partition to every earlier relay of an outbox, and read the rows of its last batch. The
-- relay fences all partitions of a topic, deletes the returned rows from its table, because they
-- are in the topic, and then reads its table again. An earlier relay may also have written and
-- deleted rows that this relay read before, so rows read before the fence must not be published.
--
-- KEYS[1]  record  HASH  streaming:mq:outbox:{T:p:i}:N
-- KEYS[2]? meta    HASH  streaming:mq:topic:{T}:meta     not on a cluster: another slot
--
-- ARGV[1]  epoch       int  epoch of the relay
-- ARGV[2]  partitions  int  partition count of the topic that the relay knows
--
-- Returns  OK      fenced     [2] rows of the last batch: 32 hex digits of the uid and 16
--                 of the id each, without separators
-- Returns  FENCED  a later relay has fenced the partition     [2] its epoch
-- Returns  MOVED   the topic has a different partition count, or none     [2] the count, or ''
--
-- Cost     O(b), b = rows of a batch
-- Repeat   idempotent: the second call returns the same
-- @include _numbers
-- @include _routed

local record, meta = KEYS[1], KEYS[2]
local epoch, partitions = ARGV[1], ARGV[2]

local found = redis.call('HMGET', record, 'epoch', 'rows')
local present = whole(found[1])
if not present then
  return bad_value(record, 'epoch', 'a whole number')
end
if present > tonumber(epoch) then
  return {'FENCED', found[1]}
end
local count = moved(meta, record, partitions)
if count then
  return {'MOVED', count}
end

-- No writes above this line
redis.call('HSET', record, 'epoch', epoch)
return {'OK', found[2] or ''}
