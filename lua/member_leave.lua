-- member_leave: present -> absent
--
-- Remove an instance's entry, if it belongs to the given run. Also used for a predecessor that is
-- proven dead (its lock is free), with the predecessor's nonce.
--
-- KEYS[1]  members  ZSET  streaming:mq:members:{F}
-- KEYS[2]  info     HASH  streaming:mq:info:{F}
--
-- ARGV[1]  id       str   instance id
-- ARGV[2]  nonce    token of the run that leaves
--
-- Returns  OK       left
-- Returns  GONE     no such member
-- Returns  OTHER    the entry belongs to another run
--
-- Cost     O(log n), n = members
-- Repeat   idempotent: the second call returns GONE. Works when memory is full

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
