-- solo_mark: inherited entries, one round at a time
--
-- Write down which entries are about to be handled, so that one that takes the whole host with it is
-- found by the next owners; acknowledge those before in the same step. Without a place solo mode
-- ends. The session is compared as well: a late copy from a connection given up would name an
-- entry that nobody is running.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry    STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   the owner's
-- ARGV[2]  session  token   the one that message_recover opened
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  places   str     about to be handled, with a space between two; '' = solo mode is over
-- ARGV[5..] acked   list    places done (charged ones go through settle_ack)
--
-- Returns  OK       marked, or over
-- Returns  SESSION  a newer connection has opened a session
-- Returns  FENCED   another owner, or none     [2] epoch [3] owner
--
-- Cost     O(a), a = places acked
-- Repeat   safe: marks the same again. Works when memory is full
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

-- Guards end here
-- HDEL first: accepted when memory is full, and so is every write behind it.
redis.call('HDEL', fence, 'mark')
acknowledge(stream, group, main_ids)
acknowledge(retry, group, retry_ids)
if places ~= '' then
  redis.call('HSET', fence, 'mark', places)
else
  redis.call('HDEL', fence, 'solo', 'accused')
end
return {'OK'}
