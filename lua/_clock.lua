-- The server's clock, and the format of numbers. No script uses another clock or another format.
--
-- Durations arrive as arguments and become instants here, so host clocks are never compared. Lua's
-- own conversion keeps 14 digits and turns a current time into 1.79e+12, so `text` formats all
-- numbers.

local function now_unix_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A score may be infinite, which not every reader accepts. Numbers beyond the exact range are
-- clamped.
local function text(number)
  return string.format('%.0f', math.max(-9007199254740991, math.min(number, 9007199254740991)))
end
