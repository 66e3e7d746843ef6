-- partition_measure: read-only
--
-- Return the figures that metrics and status show for one partition. The script examines the
-- entries inside the server, so no body is transferred to the client.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}
-- KEYS[2]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[3]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}
-- KEYS[4]  trim       HASH    streaming:mq:trim:{T:p:i}
--
-- Returns  OK  the partition was measured
--              [2] length of the stream
--              [3] number of entries ever added
--              [4] ID of the first entry, or ''
--              [5] last ID that the stream has issued, or ''
--              [6] number of dead letters of all groups
--              [7] number of delayed sends
--              [8] first ID that trimming kept, or ''
--              [9] due time of the first delayed send in Unix milliseconds, or ''
--              [10] for each Spark query that publishes its position: its group, the number of
--              unread entries or '' if the server does not know it, and the milliseconds since its
--              last report
--              [11] 1 if the server counts the entries that were ever added. Otherwise 0: the
--              script then calculates `[3]` from the record of trimming, which leaves out entries
--              that other clients removed
--
-- Cost     O(log n + g) plus the size of two bodies, where n is the number of delayed sends and g
--          the number of groups
-- Repeat   safe, because the script only reads
-- @include _clock
-- @include _groups
-- @include _numbers

local stream, dlq, scheduled, trim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local length, added, first, last, positions, counted = 0, '0', '', '', {}, 1
if redis.call('EXISTS', stream) == 1 then
  local info = to_table(redis.call('XINFO', 'STREAM', stream))
  length = info['length']
  last = info['last-generated-id']
  first = info['first-entry'] and info['first-entry'][1] or ''
  counted = info['entries-added'] and 1 or 0
  -- Before 7.0, the server does not count added entries, so present and removed ones are added up.
  added = text(info['entries-added'] or length + (to_int(redis.call('HGET', trim, 'removed')) or 0))
  for _, group in ipairs(read_groups(stream)) do
    if is_query(group) then
      local unread = group['last-delivered-id'] == last and 0 or group['lag'] or ''
      local shown = redis.call('XINFO', 'CONSUMERS', stream, group['name'])[1]
      positions[#positions + 1] = {group['name'], unread, shown and to_table(shown)['idle'] or ''}
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
