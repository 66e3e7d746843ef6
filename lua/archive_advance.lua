-- archive_advance: not archived -> archived
--
-- Record the last archived entry of a partition, or its last archived dead letter. The record only
-- moves forward, so a slower archive or a late copy of this call changes nothing.
--
-- KEYS[1]  trim    HASH  streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  id      id    the last archived entry. All entries before it are archived too
-- ARGV[2]  dead    flag  1 = it is a dead letter
--
-- Returns  OK         recorded
-- Returns  UNCHANGED  the recorded id is the same or later     [2] the recorded id
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns UNCHANGED. Works when memory is full
-- @include _ids

local trim, id, dead = KEYS[1], ARGV[1], ARGV[2]

local field = dead == '1' and 'dead_archived' or 'archived'
local archived = redis.call('HGET', trim, field)
if is_id(archived) and not older(archived, id) then
  return {'UNCHANGED', archived}
end

-- No writes above this line
-- HDEL first: it is accepted when memory is full, and so is every write after it.
redis.call('HDEL', trim, field)
redis.call('HSET', trim, field, id)
return {'OK'}
