-- control_change: any -> any
--
-- Write down what an operator wants of a fleet, take out what is wanted no more, or both. Every
-- order gets the time at which it was given. The times of a fleet's orders grow, so that an
-- instance can tell a new order from one that it has obeyed.
--
-- KEYS[1]  control    HASH  streaming:mq:control:{F}     order -> JSON
--
-- ARGV[1]  orders_max int   not more orders than this
-- ARGV[2]  field      str   the order to write, '' = none
-- ARGV[3]  body       str   JSON object of it, without its time
-- ARGV[4..] removed   list  orders to take out
--
-- Returns  OK    written                         [2] time, unix ms [3] how many were taken out
-- Returns  FULL  there are too many orders already, nothing was written     [2] how many
--
-- Cost     O(n), n = orders taken out
-- Repeat   safe; a reload or a rebalance that is ordered twice is done twice. Works when memory is
--          full
-- @include _clock
-- @include _numbers

local control = KEYS[1]
local orders_max, field, body = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local LAST_MAX = 4503599627370496

local removed = {unpack(ARGV, 4)}
-- A time that nobody can go on from is none of ours: readers take none of 2^52 or later.
local last = whole(redis.call('HGET', control, 'last')) or 0
if last >= LAST_MAX then
  last = 0
end
local count = redis.call('HLEN', control)
if field ~= '' and count > orders_max and redis.call('HEXISTS', control, field) == 0 then
  return {'FULL', text(count - 1)}
end

-- Guards end here
-- The empty order is nobody's: this goes out because it is accepted when memory is full, and so is
-- every write behind it.
redis.call('HDEL', control, '')
local at = math.max(now_unix_ms(), last + 1)
redis.call('HSET', control, 'last', text(at))
if field ~= '' then
  redis.call('HSET', control, field, '{"at_unix_ms":' .. text(at) .. ',' .. string.sub(body, 2))
end
local gone = 0
for _, name in ipairs(removed) do
  if name ~= field then
    gone = gone + redis.call('HDEL', control, name)
  end
end
return {'OK', text(at), gone}
