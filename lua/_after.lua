-- What comes after an id. Behind the last id of all there is nothing, and the server refuses the
-- question: a client may have written that id. Needs _ids.

-- At most `count` entries behind an id, up to another.
local function entries_after(source, id, upto, count)
  if id == LAST_ID then
    return {}
  end
  return redis.call('XRANGE', source, '(' .. id, upto, 'COUNT', count)
end

-- The same of what is pending; with a consumer, of what that one holds.
local function pending_after(source, group, id, count, ...)
  if id == LAST_ID then
    return {}
  end
  return redis.call('XPENDING', source, group, '(' .. id, '+', count, ...)
end
