-- Decide the outcome of each item of a call to settle. Needs _places, _fields and _settle_items.

-- Look up items that are adjacent in a stream, in two reads. Returns their pending ids and their
-- bodies, by id.
local function look_up(items, source, group)
  local first, last, count = nil, nil, 0
  for _, item in ipairs(items) do
    if item.source == source then
      first, last, count = first or item.id, item.id, count + 1
    end
  end
  local known = {pending = {}, bodies = {}}
  if count > 1 then
    for _, row in ipairs(redis.pcall('XPENDING', source, group, first, last, count)) do
      known.pending[row[1]] = true
    end
    for _, entry in ipairs(redis.call('XRANGE', source, first, last, 'COUNT', count)) do
      known.bodies[entry[1]] = #entry[2] <= WIDE and entry[2] or nil
    end
  end
  return known
end

-- Set `word`, `source` and `id` of each item, and `body` for MOVED. Only reads. Returns the error
-- of the call, if there is one: a string that is not a place, or a group that another client
-- destroyed, which its owner then restores with its pending entries. With `adjacent`, the caller
-- states that no other entry lies between the items of a stream. If that is wrong, the call only
-- takes longer: an item not found in the first reads is looked up alone.
local function decide_outcomes(items, shared, adjacent, stream, retry, group)
  for _, item in ipairs(items) do
    item.source, item.id = locate(stream, retry, item.place)
    if not item.source then
      return redis.error_reply('ERR not a place: ' .. item.place)
    end
  end
  local together = adjacent and items or {}
  local known = {
    [stream] = look_up(together, stream, group),
    [retry] = look_up(together, retry, group),
  }
  local seen = {}
  for _, item in ipairs(items) do
    local source, id = item.source, item.id
    local found = known[source]
    if seen[item.place] or not (found.pending[id] or pending(source, group, id)) then
      item.word = 'GONE'
    else
      seen[item.place] = true
      local body = found.bodies[id] or body_of(source, id)
      if not body and (shared.at['payload'] or has(item.own, 'payload')) then
        body = {}
      end
      item.word = body and 'MOVED' or 'MISSING'
      item.body = body
    end
  end
  return destroyed and redis.error_reply('NOGROUP the group ' .. group .. ' is not there') or nil
end
