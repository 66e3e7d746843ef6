-- The floor of a stream: the smallest ID that trimming must keep. Needs _groups, _ids.

-- Return the floor of a group: its first pending entry or, if it has none, the ID after the last
-- entry delivered to it.
local function group_floor(stream, group)
  if group['pending'] > 0 then
    return redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1][1]
  end
  return successor(group['last-delivered-id'])
end

-- Return true if entries that a group has not read must stay. For a group that only shows the
-- position of a Spark query, this is the case only if the query asked for it.
local function keeps_unread(group, trim)
  return not is_query(group) or redis.call('HGET', trim, 'holds:' .. group['name']) == '1'
end

local function keeping_groups(groups, trim)
  local found = {}
  for _, group in ipairs(groups) do
    if keeps_unread(group, trim) then
      found[#found + 1] = group
    end
  end
  return found
end

-- Return the lowest floor of all groups and the name of its group, or nil if there are no groups.
-- Stores the floor of each group in `record`.
local function lowest_floor(stream, groups, record)
  local floor, holder
  for _, group in ipairs(groups) do
    local own = group_floor(stream, group)
    record['floor:' .. group['name']] = own
    if not floor or older(own, floor) then
      floor, holder = own, group['name']
    end
  end
  return floor, holder
end

-- Return the first ID that is not archived. If the record has no valid ID, no entry counts as
-- archived, so all entries stay.
local function archive_floor(archived)
  return is_id(archived) and successor(archived) or '0-0'
end

-- Return the ID before which entries may be removed without losing unarchived ones. If the topic
-- does not require an archive, this is the ID after the last one.
local function archive_ceiling(trim, archive, last)
  local stored = archive_floor(redis.call('HGET', trim, 'archived'))
  return archive == '1' and earlier(stored, successor(last)) or successor(last)
end

-- Return the name of the first expected group that does not exist, or nil if all of them exist.
local function find_missing_group(groups, expected)
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
