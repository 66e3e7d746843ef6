-- The state of a held schedule. Its field `:held` contains `reason due`: the reason of the hold and
-- the due time.

-- Return the reason and the due time of a held schedule, or nil if it is not held. The due time is
-- '' if the schedule has none.
local function read_hold(schedules, name)
  local raw = redis.call('HGET', schedules, name .. ':held')
  if not raw then
    return nil
  end
  local reason, due = string.match(raw, '^(%l+) (%d*)$')
  return reason or 'unreadable', due or ''
end
