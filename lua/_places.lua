-- A place names a pending entry: `m:<id>` in the partition stream, or `r:<id>` in the group's retry
-- stream. An ID alone is ambiguous, because both streams can issue the same one. Needs _lists.

-- Return the stream and the ID of a place, or nil if the string is not a place.
local function locate(stream, retry, place)
  local letter, id = string.match(place, '^([mr]):(%d+%-%d+)$')
  if letter == 'm' then
    return stream, id
  end
  if letter == 'r' then
    return retry, id
  end
  return nil
end

-- A stream on which this call has found that the group does not exist.
local destroyed

-- Return true if an entry is pending. For a group that does not exist, return false. Every other
-- error is raised.
local function is_entry_pending(source, group, id)
  local reply = redis.pcall('XPENDING', source, group, id, id, 1)
  if reply.err then
    if string.find(reply.err, 'NOGROUP', 1, true) then
      destroyed = source
      return false
    end
    return redis.call('XPENDING', source, group, id, id, 1)
  end
  return #reply > 0
end

-- Sort places by stream. Returns the IDs in the partition stream and those in the retry stream, or
-- nil, nil and the first string that is not a place.
local function sort_places(stream, retry, places)
  local ids = {[stream] = {}, [retry] = {}}
  for _, place in ipairs(places) do
    local source, id = locate(stream, retry, place)
    if not source then
      return nil, nil, place
    end
    table.insert(ids[source], id)
  end
  return ids[stream], ids[retry], nil
end

local function acknowledge(source, group, ids)
  local acked = 0
  for at = 1, #ids, SLICE do
    acked = acked
      + redis.call('XACK', source, group, unpack(ids, at, math.min(at + SLICE - 1, #ids)))
  end
  return acked
end

local function forget_attempts(attempts, place)
  redis.call('HDEL', attempts, place .. ':c', place .. ':f', place .. ':due', place .. ':last')
end

-- Do the same for many places. In a small hash, each lookup of a field scans the whole hash. A
-- small hash is therefore read once, and only the fields that it contains are deleted.
local SMALL = 512

local function forget_all_attempts(attempts, places)
  local known, fields = nil, {}
  if redis.call('HLEN', attempts) <= SMALL then
    known = {}
    for _, field in ipairs(redis.call('HKEYS', attempts)) do
      known[field] = true
    end
  end
  for _, place in ipairs(places) do
    for _, kind in ipairs({':c', ':f', ':due', ':last'}) do
      if not known or known[place .. kind] then
        table.insert(fields, place .. kind)
      end
    end
  end
  for at = 1, #fields, SLICE do
    redis.call('HDEL', attempts, unpack(fields, at, math.min(at + SLICE - 1, #fields)))
  end
end
