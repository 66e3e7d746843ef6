-- settle_ack: in-flight -> settled
--
-- Acknowledge finished entries. The script also removes the counters of entries that were charged
-- with a crash or failed in place. The caller lists these entries first. If there are none, it need
-- not pass the key of the counters.
--
-- KEYS[1]  fence          HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream         STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry          STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]? attempts       HASH    streaming:mq:attempts:{T:p:i}:G    only with charged places
--
-- ARGV[1]  token          token   token of the owner
-- ARGV[2]  group          str     consumer group
-- ARGV[3]  charged_count  int     number of places that have counters
-- ARGV[4..] places        list    places to acknowledge, those with counters first
--
-- Returns  OK      acknowledged
--                  [2] number of entries acknowledged by this call; the others were acknowledged
--                  before, by an earlier copy of the call or by another client
-- Returns  FENCED  another owner holds the assignment, or none does
--                  [2] epoch in the fence
--                  [3] owner in the fence, or ''
--
-- Cost     O(p); p = places
-- Repeat   idempotent: the second call acknowledges nothing. Works when memory is full
-- @include _fence
-- @include _lists
-- @include _places

local fence, stream, retry, attempts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, group, charged_count = ARGV[1], ARGV[2], tonumber(ARGV[3])
local places = slice(ARGV, 4, #ARGV)

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local main_ids, retry_ids, bad = sorted(stream, retry, places)
if bad then
  return redis.error_reply('ERR not a place: ' .. bad)
end
redis.call('XLEN', stream)
redis.call('XLEN', retry)
if charged_count > 0 then
  redis.call('HLEN', attempts)
end

-- No writes above this line
for at = 1, charged_count do
  forget_attempts(attempts, places[at])
end
local acked = acknowledge(stream, group, main_ids)
acked = acked + acknowledge(retry, group, retry_ids)
return {'OK', acked}
