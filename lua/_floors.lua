-- Who still needs what of a stream: the floor, the smallest id that must stay. Needs _groups, _ids.

-- Of a group: its first pending entry, else what comes after the last delivered one.
local function floor_of(stream, group)
  if group['pending'] > 0 then
    return redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1][1]
  end
  return successor(group['last-delivered-id'])
end

-- Whether the position of a group keeps entries. That of a Spark query does only when the query
-- asked for it.
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

-- The lowest of all groups and the group that has it; nothing without groups. `record` gets the
-- floor of each.
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

-- What is not archived stays: everything before the first mark, and when nobody can read the mark.
local function archive_floor(archived)
  return is_id(archived) and successor(archived) or '0-0'
end

-- Before which id entries may go for the archive's part.
local function archive_ceiling(trim, archive, last)
  local stored = archive_floor(redis.call('HGET', trim, 'archived'))
  return archive == '1' and earlier(stored, successor(last)) or successor(last)
end

-- The first expected group that is not there.
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
