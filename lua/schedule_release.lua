-- schedule_release: held -> due
--
-- Let a held schedule be due again, at the time that it had: what has passed since is a misfire.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    name, score = due, unix ms
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        of each name: specification, …
--
-- ARGV[1]  name       str   of the schedule
--
-- Returns  OK    due again             [2] its due time, unix ms, or ''
-- Returns  GONE  it is not held
--
-- Cost     O(log n), n = schedules of the partition
-- Repeat   safe: the second answers GONE
-- @include _held

local due, schedules = KEYS[1], KEYS[2]
local name = ARGV[1]

local reason, at = held(schedules, name)
if not reason then
  return {'GONE'}
end
redis.call('ZCARD', due)

-- Guards end here
if at ~= '' then
  redis.call('ZADD', due, at, name)
end
redis.call('HDEL', schedules, name .. ':held')
return {'OK', at}
