-- renewal_swap: a partition and its fresh stream -> the fresh stream as the partition
--
-- Put the fresh stream in the place of the partition, in one step: what is not copied yet goes
-- along, and every group must have its place there and have stood still since. The record of
-- trimming is set to ids of the fresh stream.
--
-- KEYS[1]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[2]  fresh    STREAM  stream:topic:{T:p:i}:renewal
-- KEYS[3]  renewal  HASH    streaming:mq:renewal:{T:p:i}
-- KEYS[4]  trim     HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  count    int     entries that may be copied here
--
-- Returns  OK       [2] entries [3] last id
-- Returns  MORE     more entries are not copied yet: renewal_copy
-- Returns  CHANGED  a group is new, has moved, or was kept for too long: renewal_group
--                   [2] its name
-- Returns  GONE     no renewal is under way: perhaps this was done before
--
-- Cost     O(count x log n + g), g = groups; the old stream is freed in the background
-- Repeat   safe: the second answers GONE
-- @include _clock
-- @include _groups
-- @include _bytes
-- @include _ids
-- @include _after
-- @include _renewal

local stream, fresh, renewal, trim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local count = tonumber(ARGV[1])

local known = redis.call('HMGET', renewal, 'limit', 'after')
local limit = known[1]
if not limit then
  return {'GONE'}
end
local rest = entries_after(stream, known[2] or '0-0', '+', count + 1)
local size = 0
for _, entry in ipairs(rest) do
  size = size + size_of(entry[2])
  if #entry[2] > FIELDS_MAX or size > BYTES_MAX then
    return {'MORE'}
  end
end
if #rest > count then
  return {'MORE'}
end
local now, floors = now_unix_ms(), {}
for _, group in ipairs(groups_of(stream)) do
  local name = group['name']
  local stand = redis.call('HGET', renewal, 'group:' .. name) or ''
  local till, position, pending, at = string.match(stand, '^(%d+) (%S+) (%d+) (%S+)$')
  if
    not till
    or tonumber(till) <= now
    or position ~= group['last-delivered-id']
    or tonumber(pending) ~= group['pending']
  then
    return {'CHANGED', name}
  end
  floors['floor:' .. name] = at
end
local record = redis.call('HGETALL', trim)
redis.call('XLEN', fresh)

-- Guards end here
copy_to(fresh, renewal, limit, rest)
local gone = {}
for at = 1, #record, 2 do
  local field, id = record[at], record[at + 1]
  if is_id(id) and older(limit, id) and not floors[field] then
    if field == 'archived' or field == 'shrink_from' or field == 'shrink_next' then
      floors[field] = renewed_position(stream, fresh, renewal, limit, id)
    else
      gone[#gone + 1] = field
    end
  end
end
if #gone > 0 then
  redis.call('HDEL', trim, unpack(gone))
end
for field, id in pairs(floors) do
  local floor = string.sub(field, 1, 6) == 'floor:'
  redis.call('HSET', trim, field, floor and successor(id) or id)
end
if redis.call('EXISTS', fresh) == 0 then
  -- Nothing is kept and nobody reads it: an empty stream of that name has no last id.
  redis.call('UNLINK', stream, renewal)
  return {'OK', 0, '0-0'}
end
redis.call('UNLINK', stream, renewal)
redis.call('RENAME', fresh, stream)
local info = named(redis.call('XINFO', 'STREAM', stream))
return {'OK', info['length'], info['last-generated-id']}
