-- dead_mark: dead -> moving
--
-- Record the destination of a dead letter that moves to another slot. It stays a dead letter until
-- it arrives there, and cannot be moved elsewhere in the meantime. A second mark does not replace
-- the first, so a resumed move continues to the same destination.
--
-- KEYS[1]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving     HASH    streaming:mq:moving:{T:p:i}
--
-- ARGV[1]  dead_letter_id  id   the dead letter
-- ARGV[2]  target          str  its destination, '' = clear the mark: the target rejected it
--
-- Returns  OK    marked, now or before     [2] destination [3] ms since it was marked
-- Returns  GONE  no such dead letter: already replayed or purged
--
-- Cost     O(log n + size of a body), n = dead letters
-- Repeat   idempotent: returns the first mark
-- @include _clock
-- @include _numbers

local dlq, moving = KEYS[1], KEYS[2]
local dead_letter_id, target = ARGV[1], ARGV[2]

if #redis.call('XRANGE', dlq, dead_letter_id, dead_letter_id) == 0 then
  return {'GONE'}
end
redis.call('HLEN', moving)
local now = now_unix_ms()
local mark = redis.call('HGET', moving, dead_letter_id)
if mark and target ~= '' then
  local since, first = string.match(mark, '^(%d+) (.*)$')
  return {'OK', first or mark, text(now - (whole(since) or 0))}
end

-- No writes above this line
if target == '' then
  redis.call('HDEL', moving, dead_letter_id)
else
  redis.call('HSET', moving, dead_letter_id, text(now) .. ' ' .. target)
end
return {'OK', target, '0'}
