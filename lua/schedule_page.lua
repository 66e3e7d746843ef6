-- schedule_page: read-only
--
-- List the schedules of a partition that are due by the server's clock, earliest first.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    name of a schedule, score = due
--                                                                time, unix ms
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        name of a schedule ->
--                                                                specification, …
--
-- ARGV[1]  count      int   list at most this many schedules
--
-- Returns  OK  listed
--              [2] server time, unix ms
--              [3] for each schedule: name, due time, hash of its specification or ''
--              [4] due time of the next schedule that is not due yet, or ''
--
-- Cost     O(count + log n); n = schedules of the partition
-- Repeat   safe: read-only
-- @include _clock

local due, schedules = KEYS[1], KEYS[2]
local count = ARGV[1]

local now = now_unix_ms()
local found = redis.call('ZRANGEBYSCORE', due, '-inf', text(now), 'WITHSCORES', 'LIMIT', 0, count)
local rows = {}
for at = 1, #found, 2 do
  rows[#rows + 1] = found[at]
  rows[#rows + 1] = text(tonumber(found[at + 1]))
  rows[#rows + 1] = redis.call('HGET', schedules, found[at] .. ':hash') or ''
end
local later = '(' .. text(now)
local following = redis.call('ZRANGEBYSCORE', due, later, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
return {'OK', text(now), rows, following and text(tonumber(following)) or ''}
