-- schedule_stamp: orphaned -> due, declared -> declared
--
-- Record that an instance declares these schedules with these specifications. A schedule that no
-- instance has declared for some time is held as an orphan. If an instance declares it again, it
-- becomes due at its stored due time.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    names of schedules, sorted by due
--                           time
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        specification and state of each
--                           schedule
--
-- ARGV[1..] declared  list  for each schedule: its name and the hash of its specification
--
-- Returns  OK  the declarations were processed
--              [2] a word for each schedule, from the list below
--
-- Entry    SAME     the declaration was recorded
-- Entry    OTHER    the stored specification is another one, was added by an operator, or cannot be
--                   read, so nothing was done
-- Entry    MISSING  there is no schedule with this name
--
-- Cost     O(d x log n), where d is the number of declared schedules and n the number of schedules
--          of the partition
-- Repeat   idempotent, except that the second call records a later time
-- @include _clock
-- @include _held
-- @include _lists

local due, schedules = KEYS[1], KEYS[2]
local declared = slice(ARGV, 1, #ARGV)

redis.call('ZCARD', due)
local words, noted = {}, {}
for at = 1, #declared, 2 do
  local name, each = declared[at], {word = false}
  local hash, origin = unpack(redis.call('HMGET', schedules, name .. ':hash', name .. ':origin'))
  local reason, score = read_hold(schedules, name)
  if not hash then
    each.word = 'MISSING'
  elseif hash == declared[at + 1] and origin == 'file' and reason ~= 'unreadable' then
    each.word = 'SAME'
    each.name, each.reason, each.due = name, reason, score
    noted[#noted + 1] = each
  else
    each.word = 'OTHER'
  end
  words[#words + 1] = each.word
end

-- No writes above this line
local now = text(now_unix_ms())
for _, each in ipairs(noted) do
  redis.call('HSET', schedules, each.name .. ':seen', now)
  if each.reason == 'orphaned' then
    redis.call('HDEL', schedules, each.name .. ':held')
    if each.due ~= '' then
      redis.call('ZADD', due, each.due, each.name)
    end
  end
end
return {'OK', words}
