-- lease_acquire: free -> held (epoch + 1 or later)
--
-- Acquire the lease of an assignment. The caller passes the epoch that it saw when it decided to
-- acquire. If Redis executes a copy of this call minutes later, another owner may have acquired the
-- assignment in the meantime. The epoch is then a later one, so the copy changes nothing.
--
-- If the fence still contains a token, the last owner did not release the assignment. The new owner
-- inherits its pending entries and runs them in quarantine. The script uses the mark in the fence,
-- which lists the entries that the last owner was about to run, to find a message that takes down
-- hosts:
--
-- - The entries of the mark become accused, which means that each entry will run alone.
-- - An entry that is alone in the mark, and was accused or charged before, has run alone. If it is
--   still pending, the script charges it.
-- - The first charge of an accused entry counts three crashes, one for each host that was lost
--   while the entry was pending, while it ran in a round, and while it ran alone.
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
-- ARGV[1]  token       token   token of the new owner: new and random, reused only to repeat the
--                              same call
-- ARGV[2]  seen_epoch  int     epoch that the caller saw, 0 = none
-- ARGV[3]  ttl_ms      int     lifetime of the lease
-- ARGV[4]  owner       str     instance ID of the new owner
-- ARGV[5]  group       str     consumer group
-- ARGV[6]  dead_token  str     token of an earlier owner whose lease counts as free, because its
--                              processes are all proven dead, or because it was silent for longer
--                              than the lifetime of a lease; '' = none
--
-- Returns  OK     acquired
--                 [2] epoch
--                 [3] 1 = the last owner did not release the assignment
--                 [4] charged place, or ''
-- Returns  MINE   this token already holds the lease
--                 [2] epoch
--                 [3] 1 = in quarantine
-- Returns  HELD   another lease is valid
--                 [2] milliseconds until it expires
--                 [3] epoch
--                 [4] owner
-- Returns  MOVED  another owner has acquired the assignment since the caller read the epoch
--                 [2] epoch
--
-- Cost     O(log n); n = pending entries
-- Repeat   safe, even late: the second call returns MINE, HELD or MOVED, and never acquires the
--          lease again. Works when memory is full
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
local holder, epoch, mark = held[1], whole(held[2]), held[4]
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
  if source and pending(source, group, id) then
    local charged = (whole(redis.call('HGET', attempts, mark .. ':c')) or 0) > 0
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
  count_on(attempts, victim .. ':c', hits)
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
