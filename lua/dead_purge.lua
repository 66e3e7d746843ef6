-- dead_purge: dead -> gone
--
-- Delete the dead letters in `ids` and, with `before`, the oldest dead letters before that ID. The
-- script deletes them one by one with XDEL. No script trims a dead-letter stream with XTRIM,
-- because some servers cannot load a snapshot of a stream that both commands have changed.
--
-- If a deleted dead letter was moving to another slot, the script deletes its mark too. This makes
-- it the last call of a move (see `dead_mark`).
--
-- KEYS[1]  dlq      STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  moving   HASH    streaming:mq:moving:{T:p:i}
-- KEYS[3]  trim     HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  before   id      delete dead letters before this ID, '' = only those in `ids`
-- ARGV[2]  count    int     delete at most this many of the dead letters before `before`
-- ARGV[3]  archive  flag    1 = keep dead letters that are not archived
-- ARGV[4..] ids     list    dead letters to delete
--
-- Returns  OK  deleted
--              [2] number of dead letters deleted
--              [3] 1 = there may be more dead letters before `before`
--              [4] number of `ids` that are kept because they are not archived
--
-- Cost     O((count + i) x log n), and reads at most 512 KiB of bodies plus four more bodies; i =
--          `ids`, n = dead letters
-- Repeat   safe: a second call ignores `ids` that are already deleted, and deletes the next dead
--          letters before `before`. Works when memory is full
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
