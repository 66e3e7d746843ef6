-- dead_purge: dead -> gone
--
-- Delete the dead letters whose IDs are in `ids`. If `before` is set, also delete the oldest dead
-- letters before that ID. The script deletes them one by one with XDEL. No script trims a
-- dead-letter stream with XTRIM, because some servers cannot load a snapshot of a stream that both
-- commands have changed.
--
-- If a deleted dead letter was moving to another slot, the script deletes its mark too. This makes
-- it the last call of a move (see `dead_deliver`).
--
-- KEYS[1]  dlq      STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving   HASH    streaming:mq:moving:{T:p:i}
-- KEYS[3]  trim     HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  before   id      delete the dead letters before this ID, or '' to delete only those in
--                           `ids`
-- ARGV[2]  count    int     maximum number of dead letters before `before` to delete
-- ARGV[3]  archive  flag    1 to keep dead letters that are not archived
-- ARGV[4..] ids     list    dead letters to delete
--
-- Returns  OK  the dead letters were deleted
--              [2] number of dead letters deleted
--              [3] 1 if there may be more dead letters before `before`
--              [4] number of dead letters in `ids` that were kept because they are not archived
--
-- Cost     O((count + i) x log n), where i is the number of IDs in `ids` and n the number of dead
--          letters. The script reads at most 512 KiB of bodies plus four more
-- Repeat   safe: a second call ignores `ids` that are already deleted, and deletes the next dead
--          letters before `before`. The script works when memory is full
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
  -- If the record has no valid ID, no dead letter counts as archived, so all of them stay.
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
