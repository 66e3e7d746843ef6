-- schedule_declare: absent, or another specification -> due
--
-- Store a schedule. An unchanged specification changes nothing. If two files declare a schedule
-- differently, the file that was read later applies. The earlier one applies only if no instance
-- has declared the later one for `takeover_ms`.
--
-- KEYS[1]  due          ZSET  streaming:mq:schedule:due:{T:p:i}    name, score = due, unix ms
-- KEYS[2]  schedules    HASH  streaming:mq:schedule:{T:p:i}        name -> specification, …
--
-- ARGV[1]  name         str   name of the schedule
-- ARGV[2]  hash         str   hash of its specification
-- ARGV[3]  spec         str   the specification, JSON
-- ARGV[4]  origin       str   `file` or `operator`
-- ARGV[5]  since_ms     int   when the file was read, unix ms; for an operator, the time of the
--                             edit
-- ARGV[6]  takeover_ms  int   a specification that no instance declared for this long can be
--                             replaced
-- ARGV[7]  next         str   its next due time, unix ms, '' = none
-- ARGV[8]  force        flag  1 = replace any existing schedule
--
-- Returns  ADDED     new
-- Returns  REPLACED  replaced another specification, or an unreadable one
-- Returns  SAME      unchanged
-- Returns  OTHER     another release's specification stays          [2] its hash
-- Returns  OPERATOR  a schedule of this name was added by an operator
--
-- Cost     O(log n) + size of the specification, n = schedules of the partition
-- Repeat   idempotent: the second call returns SAME
-- @include _clock
-- @include _numbers
-- @include _held

local due, schedules = KEYS[1], KEYS[2]
local name, hash, spec, origin = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local since_ms, takeover_ms, next, force = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8] == '1'

local known = redis.call('HMGET', schedules, name .. ':hash', name .. ':origin', name .. ':seen',
  name .. ':since')
local known_hash, known_origin, seen = known[1], known[2], whole(known[3] or nil) or 0
local now = now_unix_ms()
local reason = held(schedules, name)
if known_hash and not force and reason ~= 'unreadable' then
  if known_origin ~= origin then
    return {'OPERATOR'}
  end
  if known_hash == hash then
    return {'SAME'}
  end
  local newer = tonumber(since_ms) > (whole(known[4] or nil) or 0)
  if not newer and now - seen <= takeover_ms then
    return {'OTHER', known_hash}
  end
end
redis.call('ZCARD', due)

-- No writes above this line
redis.call('HSET', schedules, name, spec, name .. ':hash', hash, name .. ':origin', origin,
  name .. ':since', since_ms)
if origin == 'file' then
  redis.call('HSET', schedules, name .. ':seen', text(now))
else
  redis.call('HDEL', schedules, name .. ':seen')
end
if reason == 'paused' then
  redis.call('HSET', schedules, name .. ':held', reason .. ' ' .. next)
else
  redis.call('HDEL', schedules, name .. ':held')
  if next == '' then
    redis.call('ZREM', due, name)
  else
    redis.call('ZADD', due, next, name)
  end
end
if known_hash then
  return {'REPLACED'}
end
return {'ADDED'}
