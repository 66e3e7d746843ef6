-- quarantine_mark: inherited -> recorded, one round at a time
--
-- Record the entries that are about to run in quarantine. If an entry takes down the whole host,
-- the next owner finds this mark and knows which entries were running. In the same step, the script
-- acknowledges the entries of the previous round. A call without places ends the quarantine.
--
-- The script rejects the call if the session is not that of the owner's current connection.
-- Otherwise, a late copy of the call from an abandoned connection could record entries that are not
-- running.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry    STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   session that `message_recover` opened for this connection
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  places   str     places of the entries that are about to run, separated by spaces, or ''
--                           to end the quarantine
-- ARGV[5..] acked   list    places of the entries that have finished. Charged entries are
--                           acknowledged with `settle_ack` instead
--
-- Returns  OK       the entries are recorded, or the quarantine is over
-- Returns  SESSION  the owner has opened a session on a newer connection
-- Returns  FENCED   the caller does not own the assignment, which has another owner or none
--                   [2] epoch that the fence contains
--                   [3] owner that the fence names, or '' if there is none
--
-- Cost     O(a), where a is the number of places in `acked`
-- Repeat   idempotent: the second call records the same entries. The script works when memory is
--          full
-- @include _fence
-- @include _lists
-- @include _places

local fence, stream, retry = KEYS[1], KEYS[2], KEYS[3]
local token, session, group, places = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local acked = slice(ARGV, 5, #ARGV)

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
if redis.call('HGET', fence, 'session') ~= session then
  return {'SESSION'}
end
local main_ids, retry_ids, bad = sort_places(stream, retry, acked)
for place in string.gmatch(places .. ' ', '(.-) ') do
  bad = bad or (places ~= '' and not locate(stream, retry, place) and place)
end
if bad then
  return redis.error_reply('ERR not a place: ' .. bad)
end
redis.call('XLEN', stream)
redis.call('XLEN', retry)

-- No writes above this line
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', fence, 'mark')
acknowledge(stream, group, main_ids)
acknowledge(retry, group, retry_ids)
if places ~= '' then
  redis.call('HSET', fence, 'mark', places)
else
  redis.call('HDEL', fence, 'quarantine', 'accused')
end
return {'OK'}
