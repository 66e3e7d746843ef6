-- schedule_hold: due -> held
--
-- Stop a schedule, and keep its due time for later. If the schedule is already held, the script
-- only replaces the reason.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    name of a schedule, score = due
--                                                                time, unix ms
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        name of a schedule ->
--                                                                specification, …
--
-- ARGV[1]  name       str   name of the schedule
-- ARGV[2]  reason     str   paused, orphaned, unreadable or moving
--
-- Returns  OK    held
--                [2] its due time, unix ms, or ''
-- Returns  GONE  the schedule does not exist
--
-- Cost     O(log n); n = schedules of the partition
-- Repeat   idempotent: the second call writes the same
-- @include _clock
-- @include _held

local due, schedules = KEYS[1], KEYS[2]
local name, reason = ARGV[1], ARGV[2]

local score = redis.call('ZSCORE', due, name)
local _, before = held(schedules, name)
if redis.call('HEXISTS', schedules, name .. ':hash') == 0 and not score then
  return {'GONE'}
end
local at = score and text(tonumber(score)) or before or ''

-- No writes above this line
redis.call('HSET', schedules, name .. ':held', reason .. ' ' .. at)
redis.call('ZREM', due, name)
return {'OK', at}
