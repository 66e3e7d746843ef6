-- Whole numbers that stand in Redis as text. Anybody may have written there: Lua's own conversion
-- takes hex, `inf` and 1e308, answers nothing for the rest, and every use of that raises an error.

local WHOLE_MAX = 9007199254740991  -- what a Lua number holds exactly

-- The number of a text; 0 for what is not there, nothing for what is none.
local function whole(raw)
  local digits = string.match(raw or '0', '^%d+$')
  local number = digits and #digits <= 16 and tonumber(digits)
  return number and number <= WHOLE_MAX and number or nil
end

-- What a call answers that cannot do without the value.
local function bad_value(key, field, wanted)
  return redis.error_reply('BADVALUE ' .. field .. ' of ' .. key .. ' is not ' .. wanted)
end

-- Count on; what is no number begins again. What it counts has happened, so it is never refused.
local function count_on(key, field, by)
  local counted = redis.pcall('HINCRBY', key, field, by)
  if type(counted) == 'table' or counted < by then
    redis.call('HSET', key, field, string.format('%.0f', by))
    return by
  end
  return counted
end
