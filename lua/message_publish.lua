-- message_publish: nothing -> ready
--
-- Write messages as `message_append` does, with a deduplication ID or a limit on the backlog. If
-- the deduplication ID was used before, the message is not written. With a limit, the script writes
-- messages only as long as the backlog is smaller than the limit. It checks and writes in one step,
-- so two producers cannot write the same message or exceed the limit together.
--
-- The backlog of a partition is the number of unfinished entries, pending or unread, of the group
-- that has the most. Entries that only wait for trimming do not count. If no group reads the
-- partition, all entries count. In some cases, the server does not know how many entries are
-- unread: on Redis 6.2, and for a group whose position was set by hand. The script then estimates
-- the number from the times of the first entry, the last entry read, and the last entry.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta         HASH    streaming:mq:topic:{T}:meta        not on a cluster, where it is in
--                                                                  another slot
-- KEYS[3]? dedup        STRING  streaming:mq:dedup:{T:p:i}:<id>    only with one message
--
-- ARGV[1]  partitions   int     partition count by which the messages were routed
-- ARGV[2]  window_ms    int     how long the deduplication ID is remembered
-- ARGV[3]  max_backlog  int     write no message if the backlog has this size, -1 = no limit
-- ARGV[4]  alone        flag    1 = each message consists of its payload only
-- ARGV[5..] messages    list    with `alone`, the payloads; otherwise, for each message the number
--                               of its names and values, and then the names and values
--
-- Returns  OK         all or the first messages were written
--                     [2] IDs of the entries; if the server rejected a message, its error is the
--                     last item
--                     [3] if the limit left no room for some messages, the backlog; otherwise ''
-- Returns  DUPLICATE  an earlier call has used this deduplication ID
--                     [2] ID of the entry or of the delayed send that it wrote
-- Returns  FULL       the backlog has reached the limit; nothing was written
--                     [2] backlog
-- Returns  MOVED      the topic has a different partition count, or does not exist
--                     [2] current count, or ''
--
-- Cost     O(m) plus the size of the bodies; m = messages. With a limit, if the stream may contain
--          that many entries: also O(g) and the size of one body, plus one more for each group
--          whose unread entries are estimated; g = groups
-- Repeat   idempotent with a deduplication ID: within the window, the second call returns
--          DUPLICATE. Without one, a second call writes the messages again
-- @include _routed
-- @include _write
-- @include _groups
-- @include _ids
-- @include _backlog

local stream, meta, dedup = KEYS[1], KEYS[2], KEYS[3]
local partitions, window_ms, max_backlog = ARGV[1], ARGV[2], tonumber(ARGV[3])
local alone, messages = ARGV[4], 5

local present = moved(meta, stream, partitions)
if present then
  return {'MOVED', present}
end
if dedup ~= stream then
  local earlier = redis.call('GET', dedup)
  if earlier then
    return {'DUPLICATE', earlier}
  end
end
local room, backlog = #ARGV, ''
if max_backlog >= 0 then
  local length = redis.call('XLEN', stream)
  if length + (#ARGV - messages + 1) / (alone == '1' and 1 or 3) > max_backlog then
    backlog = backlog_of(stream, length)
    room = max_backlog - backlog
    if room <= 0 then
      return {'FULL', backlog}
    end
  end
end

-- No writes above this line
local ids, left = write(stream, alone, messages, room)
if dedup ~= stream then
  redis.call('SET', dedup, ids[1], 'PX', window_ms)
end
return {'OK', ids, left <= #ARGV and backlog or ''}
