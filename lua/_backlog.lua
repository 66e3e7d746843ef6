-- The backlog of a partition: the number of messages that its slowest group has not finished. Needs
-- _groups, _ids.

-- Return the number of entries that a group has not read. If the server does not know the number,
-- it is estimated: the entries are assumed to be evenly distributed between the times of the first
-- and the last one. `last` is the ID of the last entry.

local function unread(stream, group, length, last)
  local read = group['last-delivered-id']
  if not older(read, last) then
    return 0
  end
  if group['lag'] then
    return math.min(group['lag'], length)
  end
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1][1]
  local first_ms, read_ms, last_ms = split_id(first), split_id(read), split_id(last)
  local span = last_ms - first_ms
  if older(read, first) then
    return length
  end
  return span > 0 and math.ceil((length - 1) * (last_ms - read_ms) / span) or length - 1
end

-- Return the number of unfinished entries, pending or unread, of the group that has the most. If no
-- group reads the stream, all of its `length` entries count.
local function measure_backlog(stream, length)
  local groups, backlog = read_groups(stream), 0
  if #groups == 0 then
    return length
  end
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  for _, group in ipairs(groups) do
    local waiting = last and unread(stream, group, length, last[1]) or 0
    backlog = math.max(backlog, group['pending'] + waiting)
  end
  return math.min(backlog, length)
end
