-- What a schedule has while it is not fired: `reason due`, in its field `:held`.

-- The reason and the due time of a held one, '' for a due time that there is none; nothing when it
-- is not held.
local function held(schedules, name)
  local raw = redis.call('HGET', schedules, name .. ':held')
  if not raw then
    return nil
  end
  local reason, due = string.match(raw, '^(%l+) (%d*)$')
  return reason or 'unreadable', due or ''
end
