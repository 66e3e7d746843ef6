-- schedule_hold: due -> held
--
-- Stop a schedule, and keep its due time for later. If the schedule is already held, the script
-- only replaces the reason.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    names of schedules, sorted by due
--                           time
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        specification and state of each
--                           schedule
--
-- ARGV[1]  name       str   name of the schedule
-- ARGV[2]  reason     str   reason of the hold: paused, orphaned, unreadable or moving
--
-- Returns  OK    the schedule is held
--                [2] its due time in Unix milliseconds, or ''
-- Returns  GONE  there is no schedule with this name
--
-- Cost     O(log n), where n is the number of schedules of the partition
-- Repeat   idempotent: the second call writes the same values
-- @include _clock
-- @include _held

local due, schedules = KEYS[1], KEYS[2]
local name, reason = ARGV[1], ARGV[2]

local score = redis.call('ZSCORE', due, name)
local _, before = read_hold(schedules, name)
if redis.call('HEXISTS', schedules, name .. ':hash') == 0 and not score then
  return {'GONE'}
end
local at = score and text(tonumber(score)) or before or ''

-- No writes above this line
redis.call('HSET', schedules, name .. ':held', reason .. ' ' .. at)
redis.call('ZREM', due, name)
return {'OK', at}
