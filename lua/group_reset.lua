-- group_reset: one position -> another, for a group on a partition
--
-- Move a group to another position on a partition. The script removes the pending entries from the
-- group: entries after the new position are unread again, and entries before it count as finished.
-- Crash counts restart at 0. If the group has an owner and `force` is set, the owner loses the
-- assignment in the same step, so Redis rejects every later write of its worker.
--
-- A group with more than `at_once` pending entries is reset in several calls, because XGROUP
-- DESTROY would free all entries in one command, during which the server serves no other client.
-- The first call sets the position. Each call then removes some pending entries from the group and
-- returns MORE. Until the last call, the client that resets the group holds the lease, so that no
-- other owner can acquire the assignment.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease     STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[4]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[5]  delayed   ZSET    streaming:mq:retry:{T:p:i}:G
-- KEYS[6]  items     HASH    streaming:mq:retry:item:{T:p:i}:G
-- KEYS[7]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[8]  trim      HASH    streaming:mq:trim:{T:p:i}
-- KEYS[9]  epochs    LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  group     str     consumer group
-- ARGV[2]  after     id      the group continues after this ID, or '' to continue after the last ID
--                            that the stream has issued
-- ARGV[3]  drop      flag    1 to remove the group's retries too, both waiting retries and entries
--                            of its retry stream
-- ARGV[4]  force     flag    1 to reset the group even if it is owned
-- ARGV[5]  keeper    str     name of an owner that keeps the assignment even if `force` is set
-- ARGV[6]  token     token   token of the resetting client, which holds the lease until the reset
--                            is complete
-- ARGV[7]  ttl_ms    int     lifetime of the lease, from this call
-- ARGV[8]  at_once   int     maximum number of pending entries that are forgotten in one step
-- ARGV[9]  part      int     number of pending entries that one call forgets, if there are more
--                            than `at_once`
--
-- Returns  OK       the group was reset
--                   [2] previous position
--                   [3] new position
--                   [4] number of pending entries forgotten
--                   [5] number of waiting retries dropped
--                   [6] upper bound for the number of entries dropped from the retry stream
-- Returns  MORE     the position is set, and some pending entries were forgotten; call the script
--                   again
--                   [2] previous position
--                   [3] new position
--                   [4] number of pending entries forgotten
-- Returns  OWNED    an owner holds a valid lease, and `force` is not set or does not apply to this
--                   owner
--                   [2] owner
--                   [3] epoch
-- Returns  NOGROUP  the group does not exist on the partition
--
-- Cost     O(n), where n is the number of pending entries, which is at most `at_once`
-- Repeat   safe, but a late copy sets the position again. If the caller stops after MORE, the group
--          continues from its new position, and may handle pending entries again that were not
--          forgotten. The script works when memory is full
-- @include _clock
-- @include _groups
-- @include _ids
-- @include _numbers
-- @include _lists
-- @include _places
-- @include _pending_removal
-- @include _owner_changes

local fence, lease, stream, retry = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local delayed, items, attempts, trim = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local epochs = KEYS[9]
local group, after, drop, force, keeper = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local token, ttl_ms, at_once, part = ARGV[6], ARGV[7], tonumber(ARGV[8]), tonumber(ARGV[9])

local held = redis.call('HMGET', fence, 'owner', 'epoch', 'token')
local free = held[3] == token or not redis.call('GET', lease)
if not free and (force ~= '1' or held[1] == keeper) then
  return {'OWNED', held[1] or '', held[2] or '0'}
end
local taken = held[3] and held[3] ~= token
local on_stream, on_retry = read_group(stream, group), read_group(retry, group)
if not on_stream then
  return {'NOGROUP'}
end
-- With a position after the last ID, the group would skip messages that are written later.
local last = to_table(redis.call('XINFO', 'STREAM', stream))['last-generated-id']
if after == '' or older(last, after) then
  after = last
end
local dropped, waiting, retry_end = redis.call('ZCARD', delayed), redis.call('XLEN', retry), '0-0'
redis.call('HLEN', items)
redis.call('HLEN', attempts)
redis.call('HLEN', trim)
if on_retry then
  retry_end = to_table(redis.call('XINFO', 'STREAM', retry))['last-generated-id']
end

-- No writes above this line
local dropping = drop == '1' and on_retry
if count_pending(on_stream) + count_pending(dropping) > at_once then
  hold_assignment(fence, lease, token, ttl_ms, 'group-reset')
  if taken then
    note_change(epochs, 'reset', held[2] or '0', held[1] or '', '')
  end
  redis.call('XGROUP', 'SETID', stream, group, after)
  redis.call('HSET', trim, 'floor:' .. group, successor(after))
  local forgotten = forget_oldest({{stream, on_stream}, {retry, dropping}}, part)
  return {'MORE', on_stream['last-delivered-id'], after, forgotten}
end
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', fence, 'token', 'session', 'mark', 'quarantine', 'accused', 'owner')
redis.call('DEL', lease)
if taken then
  note_change(epochs, 'reset', held[2] or '0', held[1] or '', '')
end
redis.call('XGROUP', 'DESTROY', stream, group)
redis.call('XGROUP', 'CREATE', stream, group, after)
redis.call('UNLINK', attempts)
redis.call('HSET', trim, 'floor:' .. group, successor(after))
if drop == '1' then
  if on_retry then
    redis.call('XGROUP', 'DESTROY', retry, group)
    redis.call('XGROUP', 'CREATE', retry, group, retry_end)
  end
  redis.call('UNLINK', delayed, items)
else
  dropped, waiting = 0, 0
end
return {'OK', on_stream['last-delivered-id'], after, on_stream['pending'], dropped, waiting}
