-- group_delete: present -> absent, for a group on a partition
--
-- Remove a group from a partition with all its state: its position, pending entries, retry stream,
-- waiting retries, counters, fence, lease and history of owners. Only its dead letters are kept.
-- After this call, the fence no longer exists, so Redis rejects every later call of the owner's
-- worker.
--
-- A group with more than `at_once` pending entries is removed in several calls, because XGROUP
-- DESTROY would free all entries in one command, during which the server serves no other client.
-- Each of these calls removes the oldest pending entries from the group and returns MORE. Until the
-- last call, the client that deletes the group holds the lease, so that no other owner can acquire
-- the assignment.
--
-- KEYS[1]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  delayed   ZSET    streaming:mq:retry:{T:p:i}:G
-- KEYS[4]  items     HASH    streaming:mq:retry:item:{T:p:i}:G
-- KEYS[5]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[6]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[7]  lease     STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[8]  trim      HASH    streaming:mq:trim:{T:p:i}
-- KEYS[9]  epochs    LIST    streaming:mq:epochs:{T:p:i}:G
--
-- ARGV[1]  group     str     consumer group
-- ARGV[2]  force     flag    1 to remove the group even if it is owned or has unsettled entries
-- ARGV[3]  token     token   token of the deleting client, which holds the lease until the group is
--                            removed
-- ARGV[4]  ttl_ms    int     lifetime of the lease, from this call
-- ARGV[5]  at_once   int     maximum number of pending entries that are removed together with the
--                            group
-- ARGV[6]  part      int     number of pending entries that one call forgets, if there are more
--                            than `at_once`
--
-- Returns  OK         the group was removed, or there was nothing to remove
-- Returns  MORE       some pending entries were forgotten; call the script again
-- Returns  OWNED      an owner holds a valid lease, and `force` is not set
--                     [2] owner
--                     [3] epoch
-- Returns  UNSETTLED  the group has unsettled entries, and `force` is not set
--                     [2] number of pending entries
--                     [3] number of waiting retries
--                     [4] 1 if the retry stream contains unread entries
--
-- Cost     O(n), where n is the number of pending entries, which is at most `at_once`
-- Repeat   safe, but a late copy removes a group that was created again in the meantime. If the
--          caller stops after MORE, the group stays without the forgotten entries. The script works
--          when memory is full
-- @include _clock
-- @include _groups
-- @include _ids
-- @include _ranges
-- @include _numbers
-- @include _lists
-- @include _places
-- @include _pending_removal

local stream, retry, delayed, items = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local attempts, fence, lease, trim, epochs = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local group, force, token = ARGV[1], ARGV[2], ARGV[3]
local ttl_ms, at_once, part = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])

local held = redis.call('HMGET', fence, 'owner', 'epoch')
if redis.call('GET', lease) and force ~= '1' then
  return {'OWNED', held[1] or '', held[2] or '0'}
end
local on_stream, on_retry = read_group(stream, group), read_group(retry, group)
local pending = count_pending(on_stream) + count_pending(on_retry)
local unread = 0
if on_retry then
  unread = #entries_after(retry, on_retry['last-delivered-id'], '+', 1)
end
local waiting = redis.call('ZCARD', delayed)
redis.call('HLEN', items)
redis.call('HLEN', attempts)
redis.call('HLEN', trim)
if force ~= '1' and pending + waiting + unread > 0 then
  return {'UNSETTLED', pending, waiting, unread}
end

-- No writes above this line
if pending > at_once then
  hold_assignment(fence, lease, token, ttl_ms, 'group-delete')
  forget_oldest({{stream, on_stream}, {retry, on_retry}}, part)
  return {'MORE'}
end
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', trim, 'floor:' .. group)
if on_stream then
  redis.call('XGROUP', 'DESTROY', stream, group)
end
redis.call(
  'HDEL', trim, 'dropped_unread:' .. group, 'dropped_pending:' .. group, 'holds:' .. group
)
redis.call('UNLINK', retry, delayed, items, attempts, fence, lease, epochs)
return {'OK'}
