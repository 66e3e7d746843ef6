-- assignment_measure: read-only
--
-- Return the figures that metrics and status show for one group on one partition. The script
-- examines the entries inside the server, so no body is transferred to the client.
--
-- KEYS[1]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry    STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  delayed  ZSET    streaming:mq:retry:{T:p:i}:G
--
-- ARGV[1]  group    str     consumer group
--
-- Returns  OK       the group exists
--                   [2] figures of the partition stream, as a list: number of pending entries, ID
--                   of the oldest pending entry or '', number of unread entries or '' if the server
--                   does not know it, ID of the oldest unread entry or '', and length of the stream
--                   [3] the same figures for the retry stream
--                   [4] number of waiting retries
--                   [5] time at which the next retry is due in Unix milliseconds, or ''
-- Returns  NOGROUP  the group does not exist on the partition
--
-- Cost     O(g + log n) plus the size of two bodies, where g is the number of groups and n the
--          number of pending entries
-- Repeat   safe, because the script only reads
-- @include _clock
-- @include _groups
-- @include _ids
-- @include _ranges

local stream, retry, delayed = KEYS[1], KEYS[2], KEYS[3]
local group = ARGV[1]

local on_stream, on_retry = read_group(stream, group), read_group(retry, group)
if not on_stream then
  return {'NOGROUP'}
end

local function backlog(source, at)
  if not at then
    return {0, '', 0, '', 0}
  end
  local length = redis.call('XLEN', source)
  local pending = redis.call('XPENDING', source, group)
  local oldest = entries_after(source, at['last-delivered-id'], '+', 1)[1]
  local unread = 0
  if oldest then
    local first = redis.call('XRANGE', source, '-', '+', 'COUNT', 1)[1]
    if first[1] == oldest[1] then
      unread = length
    else
      -- Redis 6.2 has no lag, and the lag of a group created in the middle of a stream is null.
      unread = at['lag'] and math.min(at['lag'], length) or ''
    end
  end
  return {pending[1], pending[2] or '', unread, oldest and oldest[1] or '', length}
end

local due = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2]
return {
  'OK',
  backlog(stream, on_stream),
  backlog(retry, on_retry),
  redis.call('ZCARD', delayed),
  due and text(tonumber(due)) or '',
}
