-- Check whether a group still has to finish a message of the partition, because the message is
-- unread, pending or a waiting retry. If the message was retried, its copy is searched for in the
-- retry stream and among the waiting retries. Only the first LOOKED_AT entries of each kind are
-- examined. Needs _groups, _ids.

local LOOKED_AT = 64

-- Return true if `fields` is the field list of a copy of this entry. `fields` may be any value,
-- because it comes from an item that any client may have written.
local function is_copy(fields, id)
  for at = 1, type(fields) == 'table' and #fields or 0, 2 do
    if fields[at] == 'originalId' then
      return fields[at + 1] == id
    end
  end
  return false
end

local function is_pending(stream, group, id)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

-- Search for a copy in the retry stream, among its pending and its unread entries.
local function in_retry_stream(retry, group, id)
  local found = read_group(retry, group)
  if not found then
    return false
  end
  for _, row in ipairs(redis.call('XPENDING', retry, group, '-', '+', LOOKED_AT)) do
    local entry = redis.call('XRANGE', retry, row[1], row[1], 'COUNT', 1)[1]
    if entry and is_copy(entry[2], id) then
      return true
    end
  end
  local after = successor(found['last-delivered-id'])
  for _, entry in ipairs(redis.call('XRANGE', retry, after, '+', 'COUNT', LOOKED_AT)) do
    if is_copy(entry[2], id) then
      return true
    end
  end
  return false
end

-- Search the waiting retries for the message itself and for its copies.
local function is_waiting(delayed, items, id)
  if redis.call('ZSCORE', delayed, 'm:' .. id) then
    return true
  end
  local first = redis.call('ZRANGEBYSCORE', delayed, '-inf', '+inf', 'LIMIT', 0, LOOKED_AT)
  for _, place in ipairs(first) do
    local packed = redis.call('HGET', items, place)
    local readable, fields = pcall(cmsgpack.unpack, packed or '')
    if readable and is_copy(fields, id) then
      return true
    end
  end
  return false
end

local function is_unfinished(stream, retry, delayed, items, group, id)
  local found = read_group(stream, group)
  if not found or not is_id(id) then
    return false
  end
  if older(found['last-delivered-id'], id) then
    return #redis.call('XRANGE', stream, id, id, 'COUNT', 1) > 0
  end
  return is_pending(stream, group, id)
    or is_waiting(delayed, items, id)
    or in_retry_stream(retry, group, id)
end
