-- The entries after an ID. The server rejects a range after the greatest ID, which a client may
-- have written. For that ID, these functions return an empty list instead. Needs _ids.

-- Return at most `count` entries after an ID, up to another ID.
local function entries_after(source, id, upto, count)
  if id == LAST_ID then
    return {}
  end
  return redis.call('XRANGE', source, '(' .. id, upto, 'COUNT', count)
end

-- Return at most `count` pending entries after an ID. If a consumer follows, return only its
-- entries.
local function pending_after(source, group, id, count, ...)
  if id == LAST_ID then
    return {}
  end
  return redis.call('XPENDING', source, group, '(' .. id, '+', count, ...)
end
