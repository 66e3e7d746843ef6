-- member_leave: present -> absent
--
-- Remove an instance from its fleet if its entry belongs to the given run. An instance calls this
-- when it leaves. The next run of the instance calls it too, with the nonce of the previous run, if
-- that run is proven dead because its lock is free.
--
-- KEYS[1]  members  ZSET   streaming:mq:members:{F}
-- KEYS[2]  info     HASH   streaming:mq:info:{F}
--
-- ARGV[1]  id       str    instance ID
-- ARGV[2]  nonce    token  nonce of the run that leaves
--
-- Returns  OK     the instance was removed
-- Returns  GONE   the instance is not a member
-- Returns  OTHER  the entry belongs to another run, so nothing was removed
--
-- Cost     O(log n), where n is the number of members
-- Repeat   idempotent: the second call returns GONE. The script works when memory is full

local members, info = KEYS[1], KEYS[2]
local id, nonce = ARGV[1], ARGV[2]

local known = redis.call('HGET', info, id)
redis.call('ZSCORE', members, id)
if not known then
  return {'GONE'}
end
local readable, held = pcall(cjson.decode, known)
if not readable or type(held) ~= 'table' or held['nonce'] ~= nonce then
  return {'OTHER'}
end

-- No writes above this line
redis.call('ZREM', members, id)
redis.call('HDEL', info, id)
return {'OK'}
