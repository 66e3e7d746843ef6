-- control_change: any -> any
--
-- Write an operator's directive for a fleet, remove directives that no longer apply, or do both in
-- one step. The script adds the current time to a directive that it writes. Within a fleet, these
-- times only increase, even if the server's clock is set back, so an instance can tell a new
-- directive from one that it has already applied.
--
-- KEYS[1]  control         HASH  streaming:mq:control:{F}    JSON of each directive, by name
--
-- ARGV[1]  directives_max  int   maximum number of directives of a fleet
-- ARGV[2]  field           str   name of the directive to write, or '' for none
-- ARGV[3]  body            str   the directive as a JSON object without the time
-- ARGV[4..] removed        list  names of the directives to remove
--
-- Returns  OK    the changes were written
--                [2] time of the change in Unix milliseconds
--                [3] number of directives removed
-- Returns  FULL  the fleet already has `directives_max` directives, so nothing was written
--                [2] number of directives
--
-- Cost     O(n), where n is the number of directives removed
-- Repeat   not idempotent: a second call gets a later time, so instances apply a reload or a
--          rebalance again. The script works when memory is full
-- @include _clock
-- @include _numbers

local control = KEYS[1]
local directives_max, field, body = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local LAST_MAX = 4503599627370496

local removed = {unpack(ARGV, 4)}
-- Readers reject times of 2^52 or later. This script never wrote such a time, so it ignores it.
local last = to_int(redis.call('HGET', control, 'last')) or 0
if last >= LAST_MAX then
  last = 0
end
local count = redis.call('HLEN', control)
if field ~= '' and count > directives_max and redis.call('HEXISTS', control, field) == 0 then
  return {'FULL', text(count - 1)}
end

-- No writes above this line
-- No directive has an empty name, so this HDEL deletes nothing. It is first because Redis accepts
-- it when memory is full, and then accepts later writes too.
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
