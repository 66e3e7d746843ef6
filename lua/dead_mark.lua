-- dead_mark: dead -> moving
--
-- Record the destination of a dead letter that moves to another slot. This is the first of the
-- three calls of a move, which `dead_deliver` describes. The message stays a dead letter until it
-- has arrived at its destination, and the mark prevents any other replay in the meantime. A dead
-- letter that is already marked keeps its first mark, which the script returns, so a resumed move
-- continues to the same destination.
--
-- KEYS[1]  dlq             STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving          HASH    streaming:mq:moving:{T:p:i}
--
-- ARGV[1]  dead_letter_id  id      the dead letter
-- ARGV[2]  target          str     its destination, or '' to remove the mark after the target has
--                                  rejected the message
--
-- Returns  OK    the dead letter is marked, by this call or an earlier one
--                [2] destination
--                [3] milliseconds since it was marked
-- Returns  GONE  the dead letter does not exist, because it was already replayed or purged
--
-- Cost     O(log n) plus the size of a body, where n is the number of dead letters
-- Repeat   idempotent: the second call returns the first mark
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
  return {'OK', first or mark, text(now - (to_int(since) or 0))}
end

-- No writes above this line
if target == '' then
  redis.call('HDEL', moving, dead_letter_id)
else
  redis.call('HSET', moving, dead_letter_id, text(now) .. ' ' .. target)
end
return {'OK', target, '0'}
