-- assignment_measure: read-only
--
-- Return the figures of one group on one partition, for metrics and status. The script examines the
-- entries inside the server, so no body is transferred to the client.
--
-- KEYS[1]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry    STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  delayed  ZSET    streaming:mq:retry:{T:p:i}:G
--
-- ARGV[1]  group    str     consumer group
--
-- Returns  OK       the group exists
--                   [2] figures of the partition: {pending entries, ID of the oldest pending entry
--                   or '', unread entries or '' if the server does not know them, ID of the oldest
--                   unread entry or '', length}
--                   [3] the same for the retry stream
--                   [4] number of waiting retries
--                   [5] time at which the next retry is due, unix ms, or ''
-- Returns  NOGROUP  the group does not exist on the partition
--
-- Cost     O(g + log n) plus the size of two bodies; g = groups, n = pending entries
-- Repeat   safe: read-only
-- @include _clock
-- @include _groups
-- @include _ids
-- @include _ranges

local stream, retry, delayed = KEYS[1], KEYS[2], KEYS[3]
local group = ARGV[1]

local on_stream, on_retry = group_on(stream, group), group_on(retry, group)
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
