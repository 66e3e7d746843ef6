-- schedule_page: read-only
--
-- List the schedules of a partition that are due by the server's clock, earliest first.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    names of schedules, sorted by due
--                           time
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        specification and state of each
--                           schedule
--
-- ARGV[1]  count      int   maximum number of schedules to list
--
-- Returns  OK  the due schedules are listed
--              [2] server time in Unix milliseconds
--              [3] for each schedule: its name, its due time, and the hash of its specification or
--              ''
--              [4] due time of the next schedule that is not due yet, or ''
--
-- Cost     O(count + log n), where n is the number of schedules of the partition
-- Repeat   safe, because the script only reads
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
