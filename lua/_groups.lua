-- The groups of a stream, as the server lists them. A stream that does not exist has no groups.

local function to_table(flat)
  local values = {}
  for at = 1, #flat, 2 do
    values[flat[at]] = flat[at + 1]
  end
  return values
end

local function read_groups(stream)
  local groups = {}
  if redis.call('EXISTS', stream) == 1 then
    for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
      groups[#groups + 1] = to_table(flat)
    end
  end
  return groups
end

local function read_group(stream, group)
  for _, found in ipairs(read_groups(stream)) do
    if found['name'] == group then
      return found
    end
  end
  return nil
end

-- Return true if no client reads with the group, because it only shows the position of a Spark
-- query.
local function is_query(group)
  return string.sub(group['name'], 1, 6) == 'spark:'
end
