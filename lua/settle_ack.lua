-- settle_ack: in-flight -> settled
--
-- Acknowledge finished entries. The script also removes the counters of entries that were charged
-- with a crash or failed in place. The caller lists these entries first, and can omit the key of
-- the counters if there are none.
--
-- KEYS[1]  fence          HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream         STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry          STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]? attempts       HASH    streaming:mq:attempts:{T:p:i}:G    only with charged places
--
-- ARGV[1]  token          token   token of the owner
-- ARGV[2]  group          str     consumer group
-- ARGV[3]  charged_count  int     number of places that have counters
-- ARGV[4..] places        list    places to acknowledge. Those with counters must be first
--
-- Returns  OK      the entries are acknowledged
--                  [2] number of entries that this call acknowledged. The others were acknowledged
--                  before, by an earlier copy of the call or by another client
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(p), where p is the number of entries in `places`
-- Repeat   idempotent: the second call acknowledges nothing. The script works when memory is full
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
local main_ids, retry_ids, bad = sort_places(stream, retry, places)
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
