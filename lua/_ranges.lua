-- The entries after an id. After the greatest id there are none, and the server rejects the range.
-- A client may have written that id, so these functions return an empty list. Needs _ids.

-- Return at most `count` entries after an id, up to another id.
local function entries_after(source, id, upto, count)
  if id == LAST_ID then
    return {}
  end
  return redis.call('XRANGE', source, '(' .. id, upto, 'COUNT', count)
end

-- The same for pending entries. With a consumer, only the entries pending for that consumer.
local function pending_after(source, group, id, count, ...)
  if id == LAST_ID then
    return {}
  end
  return redis.call('XPENDING', source, group, '(' .. id, '+', count, ...)
end
