-- dead_purge: dead -> gone
--
-- Delete dead letters by id, or the oldest ones before an id. Entries of this stream are deleted
-- one by one (XDEL), and it is never trimmed (XTRIM). The mark of a dead letter that moves to
-- another slot is deleted with it, so this is also the last step of a move.
--
-- KEYS[1]  dlq      STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving   HASH    streaming:mq:moving:{T:p:i}
-- KEYS[3]  trim     HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  before   id      delete dead letters before this id, '' = only those in `ids`
-- ARGV[2]  count    int     at most this many of the dead letters before it
-- ARGV[3]  archive  flag    1 = dead letters that are not archived stay
-- ARGV[4..] ids     list    dead letters to delete
--
-- Returns  OK       [2] removed [3] 1 = there may be more dead letters before that id [4] number of
--                   `ids` that are left because they are not archived
--
-- Cost     O((count + ids) x log n) + at most 512 KiB of bodies plus four more, n = dead letters
-- Repeat   safe: the next call removes the next dead letters. Ids that are already removed are
--          ignored. Works when memory is full
-- @include _byte_limit
-- @include _ids
-- @include _ranges
-- @include _counting
-- @include _lists

local dlq, moving, trim = KEYS[1], KEYS[2], KEYS[3]
local before, count = ARGV[1], tonumber(ARGV[2])
local archive, listed = ARGV[3], slice(ARGV, 4, #ARGV)

redis.call('XLEN', dlq)
redis.call('HLEN', moving)

local ids, kept = listed, 0
if archive == '1' then
  -- If the mark is missing or not an id, all dead letters stay.
  local mark = redis.call('HGET', trim, 'dead_archived')
  local stored = is_id(mark) and mark or '0-0'
  ids = {}
  for _, id in ipairs(listed) do
    if older(stored, id) then
      kept = kept + 1
    else
      ids[#ids + 1] = id
    end
  end
  if before ~= '' then
    before = earlier(successor(stored), before)
  end
end

local more = false
if before ~= '' then
  local _
  _, _, more = count_after(dlq, '0-0', predecessor(before), count, ids)
end

-- No writes above this line
local removed = 0
for at = 1, #ids, SLICE do
  local last = math.min(at + SLICE - 1, #ids)
  removed = removed + redis.call('XDEL', dlq, unpack(ids, at, last))
  redis.call('HDEL', moving, unpack(ids, at, last))
end
return {'OK', removed, more and 1 or 0, kept}
