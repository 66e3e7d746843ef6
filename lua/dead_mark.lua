-- dead_mark: dead -> moving
--
-- Note where a dead letter is going that leaves its slot. It stays a dead letter until it has
-- arrived; meanwhile it can be moved nowhere else. The first mark stands, so whoever resumes an
-- interrupted move goes on to the same place.
--
-- KEYS[1]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving     HASH    streaming:mq:moving:{T:p:i}
--
-- ARGV[1]  letter_id  id      the letter
-- ARGV[2]  target     str     where it goes; '' = nowhere any more: the target has refused it
--
-- Returns  OK    marked, now or before     [2] where it goes [3] marked so many ms ago
-- Returns  GONE  no such letter: replayed or purged before
--
-- Cost     O(log n + size of a body), n = letters
-- Repeat   safe: answers the first mark
-- @include _clock
-- @include _numbers

local dlq, moving = KEYS[1], KEYS[2]
local letter_id, target = ARGV[1], ARGV[2]

if #redis.call('XRANGE', dlq, letter_id, letter_id) == 0 then
  return {'GONE'}
end
redis.call('HLEN', moving)
local now = now_unix_ms()
local mark = redis.call('HGET', moving, letter_id)
if mark and target ~= '' then
  local since, first = string.match(mark, '^(%d+) (.*)$')
  return {'OK', first or mark, text(now - (whole(since) or 0))}
end

-- Guards end here
if target == '' then
  redis.call('HDEL', moving, letter_id)
else
  redis.call('HSET', moving, letter_id, text(now) .. ' ' .. target)
end
return {'OK', target, '0'}
