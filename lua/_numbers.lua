-- Integers that are stored in Redis as strings. Any client may have written them, so they are
-- checked. Lua's own conversion is not enough: it accepts hex, `inf` and 1e308, and for other
-- strings it returns nil, so that the next use raises an error.

local WHOLE_MAX = 9007199254740991  -- the greatest integer that a Lua number holds exactly

-- Return the integer in a string. The result is 0 if there is no string, and nil if the string is
-- not an integer.
local function to_int(raw)
  local digits = string.match(raw or '0', '^%d+$')
  local number = digits and #digits <= 16 and tonumber(digits)
  return number and number <= WHOLE_MAX and number or nil
end

-- Return the error of a call that cannot work without a stored value.
local function bad_value(key, field, wanted)
  return redis.error_reply('BADVALUE ' .. field .. ' of ' .. key .. ' is not ' .. wanted)
end

-- Add to a counter. If the stored value is not an integer, the counter restarts: the event to count
-- has already happened, so an invalid value must not make the call fail.
local function increment(key, field, by)
  local counted = redis.pcall('HINCRBY', key, field, by)
  if type(counted) == 'table' or counted < by then
    redis.call('HSET', key, field, string.format('%.0f', by))
    return by
  end
  return counted
end
