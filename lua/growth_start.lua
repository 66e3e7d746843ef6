-- growth_start: fixed partition count -> growing
--
-- Record that a topic will get more partitions. Nothing changes for producers or groups yet. The
-- caller then uses the same token to acquire the new partitions for each group, and holds these
-- leases until the group may read the partitions.
--
-- KEYS[1]  meta   HASH   streaming:mq:topic:{T}:meta
--
-- ARGV[1]  seen   int    partition count that the caller saw
-- ARGV[2]  to     int    target partition count
-- ARGV[3]  token  token  token of the growth, which is a new random value
--
-- Returns  OK       the growth has started, or a growth to the same count was already in progress
--                   [2] token of the growth
--                   [3] previous partition count
--                   [4] phase of the growth: started, switched or marked
--                   [5] barriers, or '' before they are marked
-- Returns  OTHER    the topic is growing to another count
--                   [2] that count
-- Returns  CHANGED  the partition count has changed since the caller saw it
--                   [2] current partition count
-- Returns  MISSING  the topic does not exist
--
-- Cost     O(1)
-- Repeat   idempotent: the second call returns the same growth. A copy that Redis executes after
--          the growth is finished returns CHANGED
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
