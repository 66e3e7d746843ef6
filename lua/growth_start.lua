-- growth_start: fixed partition count -> growing
--
-- Announce that a topic is about to get more partitions. Nothing changes for producers or groups
-- yet. The token is also that of the leases with which the growth holds the new partitions until
-- each group may read them.
--
-- KEYS[1]  meta   HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  seen   int    partition count that the caller saw
-- ARGV[2]  to     int    target partition count
-- ARGV[3]  token  token  new, random
--
-- Returns  OK       started, or in progress to the same count     [2] its token [3] previous count
--                   [4] phase: started, switched or marked [5] barriers, '' before they are marked
-- Returns  OTHER    growing to another count                      [2] that count
-- Returns  CHANGED  the count has changed since the caller saw it  [2] the count
-- Returns  MISSING  no such topic
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns the same. A late copy returns CHANGED
-- @include _clock

local meta = KEYS[1]
local seen, to, token = ARGV[1], ARGV[2], ARGV[3]

local known = redis.call(
  'HMGET', meta, 'partitionCount', 'growTo', 'growToken', 'growFrom', 'growBarriers')
local count = known[1]
if not count then
  return {'MISSING'}
end
if known[3] then
  if known[2] ~= to then
    return {'OTHER', known[2]}
  end
  local phase = known[5] and 'marked' or count == to and 'switched' or 'started'
  return {'OK', known[3], known[4], phase, known[5] or ''}
end
if count ~= seen then
  return {'CHANGED', count}
end

-- No writes above this line
redis.call(
  'HSET', meta, 'growTo', to, 'growToken', token, 'growFrom', count, 'growSince',
  text(now_unix_ms()))
return {'OK', token, count, 'started', ''}
