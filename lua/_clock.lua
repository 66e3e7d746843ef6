-- The server's clock, and the format of numbers. All scripts use this clock and this format.
--
-- Callers pass durations, which the scripts convert to instants with the server's clock, so the
-- clocks of two hosts are never compared. `text` formats all numbers, because Lua's own conversion
-- keeps only 14 digits and would turn a current time into 1.79e+12.

local function now_unix_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Return an integer as a string. Numbers beyond the range that Lua stores exactly are clamped to
-- it, because a score may be infinite, and not every reader accepts that.
local function text(number)
  return string.format('%.0f', math.max(-9007199254740991, math.min(number, 9007199254740991)))
end
