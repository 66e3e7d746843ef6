-- archive_advance: stored -> free to be trimmed
--
-- Record up to which entry a partition is archived. The mark only moves forward. A slower archive
-- or a late copy of this call must neither keep archived entries from being trimmed nor mark an
-- entry as stored when it is not.
--
-- KEYS[1]  trim    HASH  streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  id      id    the last archived entry. All entries before it are archived too
--
-- Returns  OK      recorded
-- Returns  BEHIND  the recorded id is the same or later     [2] the recorded id
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns BEHIND. Works when memory is full
-- @include _ids

local trim, id = KEYS[1], ARGV[1]

local archived = redis.call('HGET', trim, 'archived')
if is_id(archived) and not older(archived, id) then
  return {'BEHIND', archived}
end

-- Guards end here
-- HDEL first: it is accepted when memory is full, and so is every write after it.
redis.call('HDEL', trim, 'archived')
redis.call('HSET', trim, 'archived', id)
return {'OK'}
