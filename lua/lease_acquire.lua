-- lease_acquire: free -> held (epoch + 1 or later)
--
-- Take a partition for a group. The caller passes the epoch that it saw when it decided, so a copy
-- of this call that runs minutes late finds a later epoch and changes nothing. A token left in the
-- fence means that the last owner did not release the partition: its pending entries are inherited
-- and run in quarantine. The entries that it was about to handle are accused, and run alone next.
-- An entry that was accused or charged before has run alone: if it is still pending, it is charged.
-- The first charge of an accused entry is three crashes: one for each host that was lost while it
-- was pending, in a round, and alone.
--
-- KEYS[1]  fence       HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease       STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  attempts    HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[4]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[5]  retry       STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[6]  epochs      LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  token       token   new, random; reused only to repeat the same call
-- ARGV[2]  seen_epoch  int     epoch that the caller saw, 0 = none
-- ARGV[3]  ttl_ms      int     lifetime of the lease
-- ARGV[4]  owner       str     instance id
-- ARGV[5]  group       str     consumer group
-- ARGV[6]  dead_token  str     token whose processes are all proven dead, or whose owner was silent
--                              for longer than the lifetime of a lease: its lease counts as free;
--                              '' = none
--
-- Returns  OK      taken                         [2] epoch [3] 1 = not released by the last owner
--                                                [4] charged place, or ''
-- Returns  MINE    already taken with this token [2] epoch [3] 1 = in quarantine
-- Returns  HELD    another lease is valid        [2] ms until it expires [3] epoch [4] owner
-- Returns  MOVED   taken by another owner since the caller looked    [2] epoch
--
-- Cost     O(log n), n = pending entries
-- Repeat   safe, even late: returns MINE, HELD or MOVED, never takes twice. Works when memory is
--          full
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
-- The mark names the entries that the last owner was about to handle. After an unclean loss:
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
    -- At most two rounds: most entries accused earlier have run since.
    accused = #accused > #mark and mark or (accused == '' and mark or accused .. ' ' .. mark)
  end
end

-- No writes above this line
if mine then
  -- PEXPIRE is accepted when memory is full, and so is every write after it.
  if redis.call('PEXPIRE', lease, ttl_ms) == 0 or leased ~= token then
    redis.call('SET', lease, token, 'PX', ttl_ms)
  end
  return {'MINE', text(epoch), held[5] and 1 or 0}
end
-- HDEL first: it is accepted when memory is full, and so is every write after it.
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
