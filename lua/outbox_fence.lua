-- outbox_fence: epoch of an earlier relay -> epoch of this relay
--
-- Close a partition to every earlier relay of an outbox, and return the rows of the last batch that
-- was written to it.
--
-- A relay fences all partitions of a topic before it publishes. It deletes the returned rows from
-- its table, because they are already in the topic, and then reads its table again. The second read
-- is necessary because an earlier relay may have published and deleted rows after this relay had
-- read them. The relay must therefore not publish rows that it read before the fence.
--
-- KEYS[1]  record      HASH  streaming:mq:outbox:{T:p:i}:N
-- KEYS[2]? meta        HASH  streaming:mq:topic:{T}:meta    not on a cluster, where the key is in
--                            another slot
--
-- ARGV[1]  epoch       int   epoch of the relay
-- ARGV[2]  partitions  int   partition count of the topic that the relay uses
--
-- Returns  OK      the partition is fenced
--                  [2] rows of the last batch. Each row is written as 32 hex digits of its uid and
--                  16 hex digits of its ID, without separators
-- Returns  FENCED  a later relay has fenced the partition
--                  [2] epoch of that relay
-- Returns  MOVED   the topic now has a different partition count, or does not exist
--                  [2] current partition count, or '' if the topic does not exist
--
-- Cost     O(b), where b is the number of rows of a batch
-- Repeat   idempotent: the second call returns the same rows
-- @include _numbers
-- @include _routed

local record, meta = KEYS[1], KEYS[2]
local epoch, partitions = ARGV[1], ARGV[2]

local found = redis.call('HMGET', record, 'epoch', 'rows')
local present = to_int(found[1])
if not present then
  return bad_value(record, 'epoch', 'a whole number')
end
if present > tonumber(epoch) then
  return {'FENCED', found[1]}
end
local count = find_new_count(meta, record, partitions)
if count then
  return {'MOVED', count}
end

-- No writes above this line
redis.call('HSET', record, 'epoch', epoch)
return {'OK', found[2] or ''}
