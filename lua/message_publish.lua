-- message_publish: nothing -> ready
--
-- Write messages as message_append does, with a dedup id or a backlog limit. A message whose dedup
-- id was used before is not written. With a limit, messages are written only while the backlog
-- is smaller than the limit.
--
-- The backlog is that of the group with the most unfinished entries, pending and unread. Entries
-- that only wait for trimming do not count. Without a group, all entries count. If the server does
-- not know how many entries are unread (Redis 6.2, or a group whose position was set by hand), the
-- number is estimated from the times of the first, the last read and the last entry.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta         HASH    streaming:mq:topic:{T}:meta          not on a cluster: another slot
-- KEYS[3]? dedup        STRING  streaming:mq:dedup:{T:p:i}:<id>      only with one message
--
-- ARGV[1]  partitions   int     partition count by which the messages were routed
-- ARGV[2]  window_ms    int     how long the dedup id is remembered
-- ARGV[3]  max_backlog  int     write none if the backlog is this large, -1 = no limit
-- ARGV[4]  alone        flag    1 = each message is only its payload
-- ARGV[5..] messages    list    the payloads; without `alone`, for each message: the number
--                               of its names and values, then the names and values
--
-- Returns  OK         written, all or the first ones  [2] their ids; the last may be an error [3]
--                     the backlog that left no room for the others, or ''
-- Returns  DUPLICATE  already written with this dedup id  [2] id of that entry (or delayed send)
-- Returns  FULL       the backlog is at its limit     [2] backlog
-- Returns  MOVED      the topic has a different partition count, or none  [2] the count, or ''
--
-- Cost     O(m) + size of the bodies, m = messages; with a limit, if the stream has that many
--          entries: O(g), g = groups, and the size of one body, plus one more for each group whose
--          unread entries are estimated
-- Repeat   idempotent with a dedup id: returns DUPLICATE within the window. Without one it writes
--          again
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
