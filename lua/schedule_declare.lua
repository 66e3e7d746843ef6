-- schedule_declare: absent, or another specification -> due
--
-- Store a schedule, or replace its specification. If the stored specification is the same, the
-- script changes nothing.
--
-- During a rollout, two releases can declare different specifications for the same schedule. The
-- declaration from the file that was read later then replaces the other one. The earlier
-- declaration can replace it only after no instance has declared the later one for `takeover_ms`,
-- for example after a rollback. A paused schedule stays paused when it is replaced.
--
-- KEYS[1]  due          ZSET  streaming:mq:schedule:due:{T:p:i}    names of schedules, sorted by
--                             due time
-- KEYS[2]  schedules    HASH  streaming:mq:schedule:{T:p:i}        specification and state of each
--                             schedule
--
-- ARGV[1]  name         str   name of the schedule
-- ARGV[2]  hash         str   hash of its specification
-- ARGV[3]  spec         str   its specification as JSON
-- ARGV[4]  origin       str   `file` or `operator`
-- ARGV[5]  since_ms     int   time at which the file was read, or the operator edited the schedule
--                             in Unix milliseconds
-- ARGV[6]  takeover_ms  int   time after which a specification that no instance declares can be
--                             replaced
-- ARGV[7]  next         str   its next due time in Unix milliseconds, or '' for none
-- ARGV[8]  force        flag  1 to replace any existing schedule
--
-- Returns  ADDED     the schedule was stored as a new one
-- Returns  REPLACED  the schedule replaced another or an unreadable specification
-- Returns  SAME      the same specification was already stored, so nothing was written
-- Returns  OTHER     another specification is stored, and was not replaced
--                    [2] hash of that specification
-- Returns  OPERATOR  the existing schedule has another origin. If the caller declares a schedule
--                    from a file, an operator has added the existing one
--
-- Cost     O(log n) plus the size of the specification, where n is the number of schedules of the
--          partition
-- Repeat   idempotent: the second call returns SAME
-- @include _clock
-- @include _numbers
-- @include _held

local due, schedules = KEYS[1], KEYS[2]
local name, hash, spec, origin = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local since_ms, takeover_ms, next, force = ARGV[5], tonumber(ARGV[6]), ARGV[7], ARGV[8] == '1'

local known = redis.call('HMGET', schedules, name .. ':hash', name .. ':origin', name .. ':seen',
  name .. ':since')
local known_hash, known_origin, seen = known[1], known[2], to_int(known[3] or nil) or 0
local now = now_unix_ms()
local reason = read_hold(schedules, name)
if known_hash and not force and reason ~= 'unreadable' then
  if known_origin ~= origin then
    return {'OPERATOR'}
  end
  if known_hash == hash then
    return {'SAME'}
  end
  local newer = tonumber(since_ms) > (to_int(known[4] or nil) or 0)
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
