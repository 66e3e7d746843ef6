-- member_heartbeat: absent -> present, present -> present
--
-- Record the heartbeat of an instance, and return the other members and the operators' directives.
-- An instance is removed if it was silent while the caller watched and its last heartbeat is older
-- than 20 times `stale_ms`. The clock alone does not decide: after a jump, every instance would
-- look silent.
--
-- KEYS[1]  members   ZSET  streaming:mq:members:{F}     score = last heartbeat, unix ms
-- KEYS[2]  info      HASH  streaming:mq:info:{F}        instance id -> JSON with its nonce
-- KEYS[3]  control   HASH  streaming:mq:control:{F}     directive -> JSON, read only
--
-- ARGV[1]  id        str   instance id
-- ARGV[2]  nonce     token random, one for each run of the instance
-- ARGV[3]  described str   JSON: nonce, host, pid, weight, offers …
-- ARGV[4]  stale_ms  int   a heartbeat older than this does not count
-- ARGV[5..] silent   list  ids without a heartbeat while the caller watched
--
-- Returns  OK    [2] now, unix ms [3] members, for each: id, last heartbeat in unix ms, JSON [4]
--                directives and their JSON, alternating
-- Returns  DUPLICATE  another run sends heartbeats under this id
--                [2] its last heartbeat, unix ms [3] its JSON
--
-- Cost     O(n + m + s), n = members, m = directives (control_change bounds them), s = silent ids
-- Repeat   safe, but a late copy from an instance that left brings it back until it is removed for
--          its silence. Works when memory is full
-- @include _clock

local members, info, control = KEYS[1], KEYS[2], KEYS[3]
local id, nonce, described, stale_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local now = now_unix_ms()
local known = redis.call('HGET', info, id)
local beat = redis.call('ZSCORE', members, id)
if known and beat and now - tonumber(beat) < stale_ms then
  -- A record that cannot be read belongs to no run. The next heartbeat replaces it.
  local readable, held = pcall(cjson.decode, known)
  local other = readable and type(held) == 'table' and held['nonce']
  if type(other) == 'string' and other ~= nonce then
    return {'DUPLICATE', text(tonumber(beat)), known}
  end
end
local orders = redis.call('HGETALL', control)
local silent = {}
for at = 5, #ARGV do
  local last = redis.call('ZSCORE', members, ARGV[at])
  if last and now - tonumber(last) > 20 * stale_ms then
    silent[#silent + 1] = ARGV[at]
  end
end

-- No writes above this line
-- No instance has an empty id. These two commands run even if no instance is removed, because they
-- are accepted when memory is full, and so is every write after them.
redis.call('ZREM', members, '', unpack(silent))
redis.call('HDEL', info, '', unpack(silent))
redis.call('ZADD', members, text(now), id)
if known ~= described then
  redis.call('HSET', info, id, described)
end
local present = redis.call('ZRANGE', members, 0, -1, 'WITHSCORES')
local rows = {}
for at = 1, #present, 2 do
  local found = redis.call('HGET', info, present[at]) or ''
  rows[#rows + 1] = {present[at], text(tonumber(present[at + 1])), found}
end
return {'OK', text(now), rows, orders}
