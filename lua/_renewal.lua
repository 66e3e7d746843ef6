-- Moving a partition to a fresh stream. Its record says how far that is: `after`, the last entry
-- that was copied, `limit`, the last id that is kept as it is, and `id:<old>` of each that is not.
-- Needs _ids, _bytes and _after.

-- More values than this cannot be handed to a command.
local FIELDS_MAX = 7000

-- Copy entries of a page, in their order: with their ids as far as the limit, with new ones behind.
-- Returns the last one that was copied, and how many.
local function copy_to(fresh, renewal, limit, page)
  local after, copied, size = nil, 0, 0
  for _, entry in ipairs(page) do
    if size >= BYTES_MAX then
      break
    end
    local id, fields = entry[1], entry[2]
    local new = redis.call('XADD', fresh, older(limit, id) and '*' or id, unpack(fields))
    if new ~= id then
      redis.call('HSET', renewal, 'id:' .. id, new)
    end
    after, copied, size = id, copied + 1, size + size_of(fields)
  end
  if after then
    redis.call('HSET', renewal, 'after', after)
  end
  return after, copied
end

-- The id in the fresh stream of an entry that was copied.
local function renewed(renewal, limit, id)
  return older(limit, id) and redis.call('HGET', renewal, 'id:' .. id) or id
end

-- The position in the fresh stream that stands for one in the old: that entry, or if it is gone,
-- before what comes next.
local function renewed_position(stream, fresh, renewal, limit, id)
  local same = renewed(renewal, limit, id)
  if redis.call('XRANGE', fresh, same, same)[1] then
    return same
  end
  local following = entries_after(stream, id, '+', 1)[1]
  if following then
    return predecessor(renewed(renewal, limit, following[1]))
  end
  if redis.call('EXISTS', fresh) == 0 then
    return '0-0'
  end
  return named(redis.call('XINFO', 'STREAM', fresh))['last-generated-id']
end
