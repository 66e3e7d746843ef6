-- partition_measure: no transition, reads only
--
-- What metrics and status show of one partition. Entries are looked at here, so that no body
-- travels.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}
-- KEYS[2]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[3]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}
-- KEYS[4]  trim       HASH    streaming:mq:trim:{T:p:i}
--
-- Returns  OK  [2] length [3] entries ever added [4] first id or '' [5] last id ever issued or ''
--              [6] dead letters of all groups [7] scheduled [8] first id that trimming kept or ''
--              [9] due time of the first scheduled send, unix ms, or ''
--
-- Cost     O(log n) + size of two bodies, n = scheduled sends
-- Repeat   safe: reads only
-- @include _clock
-- @include _groups
-- @include _numbers

local stream, dlq, scheduled, trim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local length, added, first, last = 0, '0', '', ''
if redis.call('EXISTS', stream) == 1 then
  local info = named(redis.call('XINFO', 'STREAM', stream))
  length = info['length']
  last = info['last-generated-id']
  first = info['first-entry'] and info['first-entry'][1] or ''
  -- Before 7.0 the server does not count: what is there, and what trimming says it removed.
  added = text(info['entries-added'] or length + (whole(redis.call('HGET', trim, 'removed')) or 0))
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
}
