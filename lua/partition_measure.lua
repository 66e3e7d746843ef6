-- partition_measure: read-only
--
-- Return the figures of one partition, for metrics and status. The script examines the entries
-- inside the server, so no body is transferred to the client.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}
-- KEYS[2]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[3]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}
-- KEYS[4]  trim       HASH    streaming:mq:trim:{T:p:i}
--
-- Returns  OK  measured
--              [2] length
--              [3] number of entries ever added
--              [4] ID of the first entry, or ''
--              [5] last ID that the stream has issued, or ''
--              [6] dead letters of all groups
--              [7] delayed sends
--              [8] first ID that trimming kept, or ''
--              [9] due time of the first delayed send, unix ms, or ''
--              [10] for each position of a Spark query: group, unread entries or '' if the server
--              does not know them, milliseconds since its last report
--              [11] 1 = the server counts entries ever added, 0 = `[3]` is calculated from
--              trimming, and leaves out entries that other clients removed
--
-- Cost     O(log n + g) plus the size of two bodies; n = delayed sends, g = groups
-- Repeat   safe: read-only
-- @include _clock
-- @include _groups
-- @include _numbers

local stream, dlq, scheduled, trim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local length, added, first, last, positions, counted = 0, '0', '', '', {}, 1
if redis.call('EXISTS', stream) == 1 then
  local info = named(redis.call('XINFO', 'STREAM', stream))
  length = info['length']
  last = info['last-generated-id']
  first = info['first-entry'] and info['first-entry'][1] or ''
  counted = info['entries-added'] and 1 or 0
  -- Before 7.0, the server does not count added entries, so present and removed ones are added up.
  added = text(info['entries-added'] or length + (whole(redis.call('HGET', trim, 'removed')) or 0))
  for _, group in ipairs(groups_of(stream)) do
    if of_query(group) then
      local unread = group['last-delivered-id'] == last and 0 or group['lag'] or ''
      local shown = redis.call('XINFO', 'CONSUMERS', stream, group['name'])[1]
      positions[#positions + 1] = {group['name'], unread, shown and named(shown)['idle'] or ''}
    end
  end
end
local due = redis.call('ZRANGE', scheduled, 0, 0, 'WITHSCORES')[2]
return {
  'OK',
  length,
  added,
  first,
  last,
  redis.call('XLEN', dlq),
  redis.call('ZCARD', scheduled),
  redis.call('HGET', trim, 'first') or '',
  due and text(tonumber(due)) or '',
  positions,
  counted,
}
