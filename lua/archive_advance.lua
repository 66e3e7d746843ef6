-- archive_advance: stored -> free to be trimmed
--
-- Note up to which entry a partition is in the archive. Only forward: an archive that is behind
-- another one, or a late copy of this call, must not make the trimmer wait for what is safe, nor
-- say of anything that it is stored when it is not.
--
-- KEYS[1]  trim    HASH  streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  id      id    the last entry of the partition that is stored, with all before it
--
-- Returns  OK      noted
-- Returns  BEHIND  as far was noted before, or further     [2] the id noted
--
-- Cost     O(1)
-- Repeat   safe: the second answers BEHIND. Works when memory is full
-- @include _ids

local trim, id = KEYS[1], ARGV[1]

local archived = redis.call('HGET', trim, 'archived')
if is_id(archived) and not older(archived, id) then
  return {'BEHIND', archived}
end

-- Guards end here
-- HDEL first: accepted when memory is full, and so is every write behind it.
redis.call('HDEL', trim, 'archived')
redis.call('HSET', trim, 'archived', id)
return {'OK'}
