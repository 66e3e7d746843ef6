-- message_publish: nothing -> ready
--
-- Write messages as `message_append` does, but with a deduplication ID or a limit on the backlog.
-- If the deduplication ID was used before, the message is not written. If there is a limit, the
-- script writes messages only as long as the backlog is smaller. Because it checks and writes in
-- one step, two producers cannot write the same message twice or exceed the limit together.
--
-- To determine the backlog of a partition, the script counts the unfinished entries of each group,
-- pending or unread, and uses the largest of these counts. Entries that only wait for trimming do
-- not count. If no group reads the partition, all entries count. On Redis 6.2, and for a group
-- whose position was set by hand, the server does not know how many entries are unread. In these
-- cases, the script estimates the number from the times of the first entry, the last entry read,
-- and the last entry.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta         HASH    streaming:mq:topic:{T}:meta        not on a cluster, where the key
--                               is in another slot
-- KEYS[3]? dedup        STRING  streaming:mq:dedup:{T:p:i}:<id>    only with one message
--
-- ARGV[1]  partitions   int     partition count by which the messages were routed
-- ARGV[2]  window_ms    int     how long the deduplication ID is remembered
-- ARGV[3]  max_backlog  int     backlog from which no message is written, or -1 for no limit
-- ARGV[4]  alone        flag    1 if each message consists of its payload only
-- ARGV[5..] messages    list    the payloads if `alone` is set. Otherwise, for each message, the
--                               number of its names and values, followed by these names and values
--
-- Returns  OK         all messages, or only the first ones, were written
--                     [2] IDs of the entries. If the server rejected a message, its error is the
--                     last item
--                     [3] the backlog if the limit left no room for some messages, otherwise ''
-- Returns  DUPLICATE  an earlier call has used this deduplication ID
--                     [2] ID of the entry or of the delayed send that it wrote
-- Returns  FULL       the backlog has reached the limit, so nothing was written
--                     [2] backlog
-- Returns  MOVED      the topic now has a different partition count, or does not exist
--                     [2] current partition count, or '' if the topic does not exist
--
-- Cost     O(m) plus the size of the bodies, where m is the number of messages. With a limit, if
--          the stream may contain that many entries, the script also takes O(g), where g is the
--          number of groups. It then reads one body, and one more for each group whose unread
--          entries are estimated
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

local present = find_new_count(meta, stream, partitions)
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
    backlog = measure_backlog(stream, length)
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
