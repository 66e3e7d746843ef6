-- quarantine_mark: inherited -> recorded, one round at a time
--
-- Record the entries about to run, so that the next owner can identify an entry that takes down the
-- whole host. The same step acknowledges the previous entries. Without places, the quarantine ends.
-- The session is compared because a late copy from an abandoned connection would record an
-- entry that is not running.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry    STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   the session that message_recover opened
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  places   str     about to run, separated by spaces, '' = the quarantine is over
-- ARGV[5..] acked   list    finished places (charged ones go through settle_ack)
--
-- Returns  OK       marked, or over
-- Returns  SESSION  a newer connection opened a session
-- Returns  FENCED   another owner, or none     [2] epoch [3] owner
--
-- Cost     O(a), a = places acked
-- Repeat   idempotent: marks the same places again. Works when memory is full
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
local main_ids, retry_ids, bad = sorted(stream, retry, acked)
for place in string.gmatch(places .. ' ', '(.-) ') do
  bad = bad or (places ~= '' and not locate(stream, retry, place) and place)
end
if bad then
  return redis.error_reply('ERR not a place: ' .. bad)
end
redis.call('XLEN', stream)
redis.call('XLEN', retry)

-- No writes above this line
-- HDEL first: it is accepted when memory is full, and so is every write after it.
redis.call('HDEL', fence, 'mark')
acknowledge(stream, group, main_ids)
acknowledge(retry, group, retry_ids)
if places ~= '' then
  redis.call('HSET', fence, 'mark', places)
else
  redis.call('HDEL', fence, 'quarantine', 'accused')
end
return {'OK'}
