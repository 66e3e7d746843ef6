-- lease_acquire: free -> held (epoch + 1 or later)
--
-- Acquire the lease of an assignment. The caller passes the epoch that it saw when it decided to
-- acquire the lease. This makes a late copy of the call harmless: if another owner has acquired the
-- assignment in the meantime, the epoch has increased, so the copy changes nothing.
--
-- If the fence still contains a token, the last owner did not release the assignment. The new owner
-- inherits its pending entries and runs them in quarantine. One of these entries may be a message
-- that takes down its host. To find it, the script uses the mark in the fence, which lists the
-- entries that the last owner was about to run:
--
-- - The entries of the mark become accused, which means that the new owner will run each of them
--   alone.
-- - If the mark contains a single entry that was accused or charged before, that entry was running
--   alone when the host was lost. If it is still pending, the script charges it.
-- - The first charge of an accused entry counts three crashes, because three hosts were lost: the
--   first while the entry was pending, the second while it ran in a round with other entries, and
--   the third while it ran alone.
--
-- The script takes the lease and charges in one step, so a repeated call cannot charge an entry
-- again.
--
-- KEYS[1]  fence       HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease       STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  attempts    HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[4]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[5]  retry       STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[6]  epochs      LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  token       token   token of the new owner, which is a new random value. It is used
--                              again only to repeat this call
-- ARGV[2]  seen_epoch  int     epoch that the caller saw, or 0 for none
-- ARGV[3]  ttl_ms      int     lifetime of the lease
-- ARGV[4]  owner       str     instance ID of the new owner
-- ARGV[5]  group       str     consumer group
-- ARGV[6]  dead_token  str     token of an earlier owner whose lease can be taken over, because its
--                              processes are all proven dead, or because it was silent for longer
--                              than the lifetime of a lease, or '' for none
--
-- Returns  OK     the lease was acquired
--                 [2] epoch
--                 [3] 1 if the last owner did not release the assignment
--                 [4] place of the entry that was charged, or ''
-- Returns  MINE   this token already holds the lease
--                 [2] epoch
--                 [3] 1 if the assignment is in quarantine
-- Returns  HELD   another holder has a valid lease
--                 [2] milliseconds until it expires
--                 [3] epoch
--                 [4] owner
-- Returns  MOVED  another owner has acquired the assignment since the caller read the epoch
--                 [2] epoch
--
-- Cost     O(log n), where n is the number of pending entries
-- Repeat   safe, even late: the second call returns MINE, HELD or MOVED, and never acquires the
--          lease again. The script works when memory is full
-- @include _clock
-- @include _numbers
-- @include _lists
-- @include _places
-- @include _owner_changes

local fence, lease, attempts, stream, retry = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local epochs = KEYS[6]
local token, seen_epoch, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local owner, group, dead_token = ARGV[4], ARGV[5], ARGV[6]

local held = redis.call('HMGET', fence, 'token', 'epoch', 'owner', 'mark', 'quarantine', 'accused')
local holder, epoch, mark = held[1], to_int(held[2]), held[4]
local leased = redis.call('GET', lease)
if leased and leased ~= token and (dead_token == '' or leased ~= dead_token) then
  return {'HELD', text(redis.call('PTTL', lease)), text(epoch or 0), held[3] or ''}
end
if not epoch then
  return bad_value(fence, 'epoch', 'a whole number')
end
local mine = holder == token
if not mine and epoch ~= tonumber(seen_epoch) then
  return {'MOVED', text(epoch)}
end
local unclean = holder ~= false
-- The mark lists the entries that the last owner was about to handle. If the owner did not release
-- the assignment, the mark determines which entry is charged and which entries are accused:
--
--   Mark                                  Charged                Accused
--   none, or an entry that is finished    -                      as before
--   one entry, charged before             that entry, 1 crash    as before
--   one entry, accused before             that entry, 3 crashes  as before
--   another entry                         -                      as before, and that entry
--   several entries                       -                      as before, and these entries; only
--                                                                these if their list is longer
local victim, hits, accused = '', 1, held[6] or ''
if unclean and not mine and mark then
  local source, id = locate(stream, retry, mark)
  if source and is_entry_pending(source, group, id) then
    local charged = (to_int(redis.call('HGET', attempts, mark .. ':c')) or 0) > 0
    if charged or string.find(' ' .. accused .. ' ', ' ' .. mark .. ' ', 1, true) then
      victim, hits = mark, charged and 1 or 3
    else
      accused = accused == '' and mark or accused .. ' ' .. mark
    end
  elseif string.find(mark, ' ', 1, true) then
    -- The list covers at most two rounds. Most entries that were accused earlier have run since.
    accused = #accused > #mark and mark or (accused == '' and mark or accused .. ' ' .. mark)
  end
end

-- No writes above this line
if mine then
  -- Redis accepts PEXPIRE when memory is full, and then accepts later writes too.
  if redis.call('PEXPIRE', lease, ttl_ms) == 0 or leased ~= token then
    redis.call('SET', lease, token, 'PX', ttl_ms)
  end
  return {'MINE', text(epoch), held[5] and 1 or 0}
end
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', fence, 'mark', 'session')
if victim ~= '' then
  increment(attempts, victim .. ':c', hits)
end
local now = now_unix_ms()
epoch = math.max(epoch + 1, now)
redis.call('HSET', fence, 'token', token, 'epoch', text(epoch), 'owner', owner, 'since', text(now))
if unclean then
  redis.call('HSET', fence, 'quarantine', '1')
  if accused ~= '' then
    redis.call('HSET', fence, 'accused', accused)
  end
end
redis.call('SET', lease, token, 'PX', ttl_ms)
local event = unclean and 'inherited' or 'acquired'
note_change(epochs, event, text(epoch), owner, unclean and held[3] or '')
return {'OK', text(epoch), unclean and 1 or 0, victim}
