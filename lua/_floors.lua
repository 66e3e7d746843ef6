-- The floor of a stream: the smallest id that must stay. Needs _groups, _ids.

-- Return the floor of a group: its first pending entry, or else the id after the last delivered
-- one.
local function floor_of(stream, group)
  if group['pending'] > 0 then
    return redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1][1]
  end
  return successor(group['last-delivered-id'])
end

-- Return true if the position of a group keeps entries. The position of a Spark query does so only
-- if the query asked for it.
local function keeps(group, trim)
  return not of_query(group) or redis.call('HGET', trim, 'holds:' .. group['name']) == '1'
end

local function keeping(groups, trim)
  local found = {}
  for _, group in ipairs(groups) do
    if keeps(group, trim) then
      found[#found + 1] = group
    end
  end
  return found
end

-- Return the lowest floor of all groups and the group that has it, or nil without groups. Stores
-- the floor of each group in `record`.
local function lowest_floor(stream, groups, record)
  local floor, holder
  for _, group in ipairs(groups) do
    local own = floor_of(stream, group)
    record['floor:' .. group['name']] = own
    if not floor or older(own, floor) then
      floor, holder = own, group['name']
    end
  end
  return floor, holder
end

-- Entries that are not archived stay. If the mark is missing or not an id, all entries stay.
local function archive_floor(archived)
  return is_id(archived) and successor(archived) or '0-0'
end

-- Return the id before which the archive allows entries to be trimmed.
local function archive_ceiling(trim, archive, last)
  local stored = archive_floor(redis.call('HGET', trim, 'archived'))
  return archive == '1' and earlier(stored, successor(last)) or successor(last)
end

-- Return the first expected group that does not exist.
local function absent(groups, expected)
  local present = {}
  for _, group in ipairs(groups) do
    present[group['name']] = true
  end
  for _, name in ipairs(expected) do
    if not present[name] then
      return name
    end
  end
  return nil
end
