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
-- ARGV[2]  count   int     at most so many of the older ones
-- ARGV[3..] ids    list    letters to delete
--
-- Returns  OK      [2] removed [3] 1 = there may be more of the older ones
--
-- Cost     O((count + letters named) x log n) + 512 KiB of bodies at most and one more, n = letters
-- Repeat   safe: removes the next older ones; letters named are gone. Works when memory is full
-- @include _bytes
-- @include _ids
-- @include _lists

local dlq, moving = KEYS[1], KEYS[2]
local before, count, ids = ARGV[1], tonumber(ARGV[2]), slice(ARGV, 3, #ARGV)

redis.call('XLEN', dlq)
redis.call('HLEN', moving)

-- Guards end here
local removed, more = 0, 0
local function remove(id)
  removed = removed + redis.call('XDEL', dlq, id)
  redis.call('HDEL', moving, id)
end
for _, id in ipairs(ids) do
  remove(id)
end
if before ~= '' then
  -- One at a time, as the server cannot name an entry without its body.
  local size, left = 0, count
  more = 1
  while more == 1 and left > 0 and size < BYTES_MAX do
    local first = redis.call('XRANGE', dlq, '-', '+', 'COUNT', 1)[1]
    if first and older(first[1], before) then
      remove(first[1])
      size, left = size + size_of(first[2]), left - 1
    else
      more = 0
    end
  end
end
return {'OK', removed, more}
