-- The one clock, and the one way to write a number.
--
-- Durations arrive as arguments and become instants here, so clocks of hosts never meet. Lua's own
-- conversions keep 14 digits, which turns a time of today into 1.79e+12: numbers go out by `text`.

local function now_unix_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A score may be infinite, which not every reader takes: beyond what is exact a number is cut.
local function text(number)
  return string.format('%.0f', math.max(-9007199254740991, math.min(number, 9007199254740991)))
end
