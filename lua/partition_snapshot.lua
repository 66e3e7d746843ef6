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
-- ARGV[2]  limit      int     maximum number of unread entries to count in each stream
--
-- Returns  OK       the messages were counted
--                   [2] length of the partition stream
--                   [3] number of unread entries of the partition stream, or -1 if there are more
--                   than `limit` or more than one call can count
--                   [4] number of pending entries of the partition stream
--                   [5] number of waiting retries
--                   [6] number of unread entries of the retry stream, or -1 as for `[3]`
--                   [7] number of pending entries of the retry stream
--                   [8] number of dead letters of all groups
--                   [9] number of delayed sends
-- Returns  NOGROUP  the group does not exist on one of the two streams
--
-- Cost     O(limit x log n), where n is the number of entries. The script reads at most 1 MiB of
--          bodies plus eight more
-- Repeat   safe, because the script only reads
-- @include _groups
-- @include _byte_limit
-- @include _ids
-- @include _ranges
-- @include _counting

local stream, retry, delayed, dlq, scheduled = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local group, limit = ARGV[1], tonumber(ARGV[2])

local on_stream = read_group(stream, group)
local on_retry = read_group(retry, group)
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
