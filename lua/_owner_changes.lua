-- The last changes of owner of an assignment, for operators. No script reads this list. If the key
-- has another type, or the user may not run RPUSH, the owner still changes, but without a record.

local CHANGES_MAX = 40  -- about 20 owners in 2 KiB

local function note_change(epochs, event, epoch, owner, other)
  local change = text(now_unix_ms()) .. ' ' .. event .. ' ' .. epoch .. ' ' .. owner .. ' ' .. other
  local length = redis.pcall('RPUSH', epochs, change)
  if type(length) == 'number' and length > CHANGES_MAX then
    redis.pcall('LTRIM', epochs, -CHANGES_MAX, -1)
  end
end
