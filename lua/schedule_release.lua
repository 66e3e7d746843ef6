-- schedule_release: held -> due
--
-- Make a held schedule due again at its stored due time. If that time has passed, the ticks since
-- then count as misfires.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    names of schedules, sorted by due
--                           time
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        specification and state of each
--                           schedule
--
-- ARGV[1]  name       str   name of the schedule
--
-- Returns  OK    the schedule is due again
--                [2] its due time in Unix milliseconds, or ''
-- Returns  GONE  there is no held schedule with this name
--
-- Cost     O(log n), where n is the number of schedules of the partition
-- Repeat   idempotent: the second call returns GONE
-- @include _held

local due, schedules = KEYS[1], KEYS[2]
local name = ARGV[1]

local reason, at = read_hold(schedules, name)
if not reason then
  return {'GONE'}
end
redis.call('ZCARD', due)

-- No writes above this line
if at ~= '' then
  redis.call('ZADD', due, at, name)
end
redis.call('HDEL', schedules, name .. ':held')
return {'OK', at}
