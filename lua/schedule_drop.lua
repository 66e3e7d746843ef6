-- schedule_drop: due or held -> gone
--
-- Remove a schedule with all its state.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}     names of schedules, sorted by due
--                           time
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}         specification and state of each
--                           schedule
-- KEYS[3]  last       HASH  streaming:mq:schedule:last:{T:p:i}    last message and counters of each
--                           schedule
--
-- ARGV[1]  name       str   name of the schedule
--
-- Returns  OK    the schedule was removed
-- Returns  GONE  there is no schedule with this name
--
-- Cost     O(log n), where n is the number of schedules of the partition
-- Repeat   idempotent: the second call returns GONE. The script works when memory is full

local due, schedules, last = KEYS[1], KEYS[2], KEYS[3]
local name = ARGV[1]

local score = redis.call('ZSCORE', due, name)
if redis.call('HEXISTS', schedules, name .. ':hash') == 0 and not score then
  return {'GONE'}
end
-- If the key has another type, this read raises the error before anything is written.
redis.call('HLEN', last)

-- No writes above this line
redis.call('HDEL', last, name .. ':tick', name .. ':id', name .. ':late', name .. ':fired',
  name .. ':skipped', name .. ':ran')
redis.call('ZREM', due, name)
redis.call('HDEL', schedules, name, name .. ':hash', name .. ':origin', name .. ':since',
  name .. ':seen', name .. ':held')
return {'OK'}
