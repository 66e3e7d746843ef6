-- partition_snapshot: read-only
--
-- Count the messages of a group on a partition by their state. All counts are from the same
-- instant, so no message is missing or counted in two states. `run --burst` uses them to exit when
-- no message is left, and tests use them to check that no message is lost or in two states.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry      STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  delayed    ZSET    streaming:mq:retry:{T:p:i}:G
-- KEYS[4]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[5]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}
--
-- ARGV[1]  group      str     consumer group
-- ARGV[2]  limit      int     count at most this many unread entries of each stream
--
-- Returns  OK       counted
--                   [2] length of the partition stream
--                   [3] unread entries, -1 = more than `limit` or more than one call can count
--                   [4] pending entries
--                   [5] waiting retries
--                   [6] unread entries of the retry stream, -1 as in `[3]`
--                   [7] pending entries of the retry stream
--                   [8] dead letters of all groups
--                   [9] delayed sends
-- Returns  NOGROUP  the group does not exist on one of the two streams
--
-- Cost     O(limit x log n), and reads at most 1 MiB of bodies plus eight more bodies; n = entries
-- Repeat   safe: read-only
-- @include _groups
-- @include _byte_limit
-- @include _ids
-- @include _ranges
-- @include _counting

local stream, retry, delayed, dlq, scheduled = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local group, limit = ARGV[1], tonumber(ARGV[2])

local on_stream = group_on(stream, group)
local on_retry = group_on(retry, group)
if not on_stream or not on_retry then
  return {'NOGROUP'}
end

-- The script counts unread entries, because the server's own `lag` is missing on Redis 6.2, and on
-- later versions it is sometimes null and sometimes wrong.
local function unread(source, last)
  local count, _, more = count_after(source, last, '+', limit + 1)
  return more and -1 or count
end

return {
  'OK',
  redis.call('XLEN', stream),
  unread(stream, on_stream['last-delivered-id']),
  on_stream['pending'],
  redis.call('ZCARD', delayed),
  unread(retry, on_retry['last-delivered-id']),
  on_retry['pending'],
  redis.call('XLEN', dlq),
  redis.call('ZCARD', scheduled),
}
