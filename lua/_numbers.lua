-- Integers stored in Redis as strings. Any client may have written them. Lua's own conversion
-- accepts hex, `inf` and 1e308, and returns nil for other strings, so that every later use raises
-- an error.

local WHOLE_MAX = 9007199254740991  -- the greatest integer that a Lua number holds exactly

-- Return the integer in a string: 0 without a string, nil if it is not an integer.
local function whole(raw)
  local digits = string.match(raw or '0', '^%d+$')
  local number = digits and #digits <= 16 and tonumber(digits)
  return number and number <= WHOLE_MAX and number or nil
end

-- Return the error of a call that cannot work without the value.
local function bad_value(key, field, wanted)
  return redis.error_reply('BADVALUE ' .. field .. ' of ' .. key .. ' is not ' .. wanted)
end

-- Add to a counter, and restart it if it is not an integer. The counted event has already happened,
-- so counting is never rejected.
local function count_on(key, field, by)
  local counted = redis.pcall('HINCRBY', key, field, by)
  if type(counted) == 'table' or counted < by then
    redis.call('HSET', key, field, string.format('%.0f', by))
    return by
  end
  return counted
end
