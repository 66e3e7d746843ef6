-- archive_advance: not archived -> archived
--
-- Record how far the archive of a partition has come: the last archived entry or, with `dead`, the
-- last archived dead letter. If a topic requires an archive, trimming and purging read this record
-- and remove only archived entries. The script compares and writes in one step, so the record only
-- moves forward: neither a slower archive nor a late copy of this call can move it back.
--
-- KEYS[1]  trim  HASH  streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  id    id    the last archived entry or dead letter; all earlier ones are archived too
-- ARGV[2]  dead  flag  1 if `id` is a dead letter
--
-- Returns  OK         the ID was recorded
-- Returns  UNCHANGED  the record already contains this ID or a later one
--                     [2] the recorded ID
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns UNCHANGED. The script works when memory is full
-- @include _ids

local trim, id, dead = KEYS[1], ARGV[1], ARGV[2]

local field = dead == '1' and 'dead_archived' or 'archived'
local archived = redis.call('HGET', trim, field)
if is_id(archived) and not older(archived, id) then
  return {'UNCHANGED', archived}
end

-- No writes above this line
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', trim, field)
redis.call('HSET', trim, field, id)
return {'OK'}
