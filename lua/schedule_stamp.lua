-- schedule_stamp: orphaned -> due, declared -> declared
--
-- Record that an instance declares these specifications. A schedule held as an orphan becomes due
-- again at its stored due time.
--
-- KEYS[1]  due        ZSET  streaming:mq:schedule:due:{T:p:i}    name, score = due, unix ms
-- KEYS[2]  schedules  HASH  streaming:mq:schedule:{T:p:i}        name -> specification, …
--
-- ARGV[1..] declared  list  for each: name, hash
--
-- Returns  OK  [2] a word for each
--
-- Entry    SAME     recorded
-- Entry    OTHER    another specification, one added by an operator, or an unreadable one;
--                   nothing done
-- Entry    MISSING  there is no schedule of this name
--
-- Cost     O(d x log n), d = declared schedules, n = schedules of the partition
-- Repeat   idempotent
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
  local reason, score = held(schedules, name)
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
