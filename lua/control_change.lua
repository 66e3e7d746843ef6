-- control_change: any -> any
--
-- Write a directive of an operator for a fleet, remove directives that no longer apply, or both.
-- Each directive contains the time at which it was written. These times only grow within a fleet,
-- so that an instance can distinguish a new directive from one that it has applied.
--
-- KEYS[1]  control    HASH  streaming:mq:control:{F}     directive -> JSON
--
-- ARGV[1]  directives_max int   maximum number of directives
-- ARGV[2]  field      str   the directive to write, '' = none
-- ARGV[3]  body       str   its JSON object, without the time
-- ARGV[4..] removed   list  directives to remove
--
-- Returns  OK    written                         [2] time, unix ms [3] number removed
-- Returns  FULL  there are already `directives_max` directives; nothing was written
--                                                [2] number of directives
--
-- Cost     O(n), n = directives removed
-- Repeat   not idempotent: a repeated reload or rebalance is applied twice. Works when memory is
--          full
-- @include _clock
-- @include _numbers

local control = KEYS[1]
local directives_max, field, body = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local LAST_MAX = 4503599627370496

local removed = {unpack(ARGV, 4)}
-- Readers reject times of 2^52 or later. Such a time was not written by this script.
local last = whole(redis.call('HGET', control, 'last')) or 0
if last >= LAST_MAX then
  last = 0
end
local count = redis.call('HLEN', control)
if field ~= '' and count > directives_max and redis.call('HEXISTS', control, field) == 0 then
  return {'FULL', text(count - 1)}
end

-- No writes above this line
-- No directive has an empty name. This HDEL runs because it is accepted when memory is full, and so
-- is every write after it.
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
