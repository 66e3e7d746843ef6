-- Decide the outcome of each item of a call that settles entries. Needs _places, _fields and
-- _settle_items.

-- Look up all items that are adjacent in a stream with two reads. Returns the IDs that are pending,
-- and the bodies by ID.
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

-- Set `word`, `source` and `id` of each item, and `body` if the word is MOVED. This function only
-- reads. It returns an error if a string is not a place, or if another client has destroyed the
-- group. The owner then restores the group with its pending entries.
--
-- With `adjacent`, the caller states that no other entry lies between the items of a stream. If
-- this is wrong, the call only takes longer, because each item that the first reads have not found
-- is looked up alone.
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
    if seen[item.place] or not (found.pending[id] or is_entry_pending(source, group, id)) then
      item.word = 'GONE'
    else
      seen[item.place] = true
      local body = found.bodies[id] or read_body(source, id)
      if not body and (shared.at['payload'] or has_field(item.own, 'payload')) then
        body = {}
      end
      item.word = body and 'MOVED' or 'MISSING'
      item.body = body
    end
  end
  return destroyed and redis.error_reply('NOGROUP the group ' .. group .. ' is not there') or nil
end
