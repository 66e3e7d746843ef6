-- dead_purge: dead -> gone
--
-- Delete dead letters: those named, or the oldest ones before an id. The dead-letter stream is the
-- one stream that is deleted from, and therefore never trimmed. Marks of letters on their way out of
-- the slot go with them: this is also the last step of a move.
--
-- KEYS[1]  dlq     STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving  HASH    streaming:mq:moving:{T:p:i}
--
-- ARGV[1]  before  id      delete what is older than this id; '' = only the letters named
-- ARGV[2]  count   int     at most this many of the older ones
-- ARGV[3..] ids    list    letters to delete
--
-- Returns  OK      [2] removed [3] 1 = there may be more of the older ones
--
-- Cost     O((count + letters named) x log n) + 512 KiB of bodies at most and four more, n = letters
-- Repeat   safe: removes the next older ones; letters named are gone. Works when memory is full
-- @include _bytes
-- @include _ids
-- @include _after
-- @include _count
-- @include _lists

local dlq, moving = KEYS[1], KEYS[2]
local before, count, ids = ARGV[1], tonumber(ARGV[2]), slice(ARGV, 3, #ARGV)

redis.call('XLEN', dlq)
redis.call('HLEN', moving)

local more = false
if before ~= '' then
  local _
  _, _, more = count_after(dlq, '0-0', predecessor(before), count, ids)
end

-- Guards end here
local removed = 0
for at = 1, #ids, SLICE do
  local last = math.min(at + SLICE - 1, #ids)
  removed = removed + redis.call('XDEL', dlq, unpack(ids, at, last))
  redis.call('HDEL', moving, unpack(ids, at, last))
end
return {'OK', removed, more and 1 or 0}
