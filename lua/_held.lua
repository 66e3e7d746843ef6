-- The state of a schedule that is held: `reason due`, in its field `:held`.

-- Return the reason and the due time of a held schedule, or nil if it is not held. A due time of ''
-- means that it has none.
local function held(schedules, name)
  local raw = redis.call('HGET', schedules, name .. ':held')
  if not raw then
    return nil
  end
  local reason, due = string.match(raw, '^(%l+) (%d*)$')
  return reason or 'unreadable', due or ''
end
