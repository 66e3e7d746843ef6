-- member_heartbeat: absent -> present, present -> present
--
-- Record the heartbeat of an instance, and return the members of its fleet and the operators'
-- directives. The script rejects the heartbeat if another run of the daemon uses the same instance
-- ID and is still alive.
--
-- The script also removes instances that have disappeared. For this, an instance must meet two
-- conditions: the caller has listed it in `silent`, because it has seen no heartbeat of the
-- instance for some time, and the last heartbeat is older than 20 times `stale_ms`. The age of the
-- heartbeat alone is not enough, because every instance would seem to be silent after a jump of the
-- clock.
--
-- KEYS[1]  members    ZSET   streaming:mq:members:{F}    sorted by the time of the last heartbeat
-- KEYS[2]  info       HASH   streaming:mq:info:{F}       JSON with the nonce of the run, by
--                            instance ID
-- KEYS[3]  control    HASH   streaming:mq:control:{F}    JSON of each directive, by name; the
--                            script only reads it
--
-- ARGV[1]  id         str    instance ID
-- ARGV[2]  nonce      token  random value, a new one for each run of the instance
-- ARGV[3]  described  str    description of the instance as JSON, with fields such as `nonce`,
--                            `host`, `pid` and `weight`
-- ARGV[4]  stale_ms   int    age from which a heartbeat no longer counts
-- ARGV[5..] silent    list   IDs of instances whose heartbeat the caller has not seen while it
--                            watched the fleet
--
-- Returns  OK         the heartbeat was recorded
--                     [2] server time in Unix milliseconds
--                     [3] members, each with its ID, the time of its last heartbeat in Unix
--                     milliseconds, and its JSON
--                     [4] directives and their JSON, alternating
-- Returns  DUPLICATE  another run sends heartbeats under this ID, so nothing was written
--                     [2] time of its last heartbeat in Unix milliseconds
--                     [3] JSON description of that run
--
-- Cost     O(n + m + s), where n is the number of members, m the number of directives, which
--          `control_change` limits, and s the number of silent instances
-- Repeat   safe, but a late copy from an instance that has left adds the instance again, until it
--          is removed because it is silent. The script works when memory is full
-- @include _clock

local members, info, control = KEYS[1], KEYS[2], KEYS[3]
local id, nonce, described, stale_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local now = now_unix_ms()
local known = redis.call('HGET', info, id)
local beat = redis.call('ZSCORE', members, id)
if known and beat and now - tonumber(beat) < stale_ms then
  -- A record that cannot be read belongs to no run, so this heartbeat replaces it.
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
-- No instance has an empty ID. These commands run even if no instance is removed, because Redis
-- accepts them when memory is full, and then accepts later writes too.
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
