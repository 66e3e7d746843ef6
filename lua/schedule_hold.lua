-- schedule_hold: due -> held
--
-- Stop a schedule and keep its due time. A schedule that is already held gets the new reason.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    name, score = due, unix ms
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        name -> specification, …
--
-- ARGV[1]  name       str   name of the schedule
-- ARGV[2]  reason     str   paused, orphaned, unreadable or moving
--
-- Returns  OK    held                       [2] its due time, unix ms, or ''
-- Returns  GONE  no such schedule
--
-- Cost     O(log n), n = schedules of the partition
-- Repeat   idempotent
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
