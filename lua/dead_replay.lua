-- dead_replay: dead -> ready
--
-- Put a dead letter back into the retry stream of its own group, or into the partition for every
-- group. It is one step, so it cannot happen twice. Fields that only a dead letter has (reason,
-- place and time of the failure) are dropped. Fields of an entry (payload, key, headers,
-- originalId, counters) are kept, with the changes that the caller sends.
--
-- KEYS[1]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  target     STREAM  stream:topic:{T:p:i}:retry:G, or stream:topic:{T:p:i}
-- KEYS[3]  moving     HASH    streaming:mq:moving:{T:p:i}
--
-- ARGV[1]  dead_letter_id  id      the dead letter
-- ARGV[2]  group           str     group of the target retry stream, '' = target is the partition
-- ARGV[3..] changed        list    names and values: retryCount 0, crashCount 0, replayCount + 1
--
-- Returns  OK        [2] new id
-- Returns  GONE      no such dead letter: already replayed or purged
-- Returns  MISMATCH  it belongs to another group                 [2] that group
-- Returns  MOVING    it is moving to another slot                [2] its destination
-- Returns  NOGROUP   the group does not exist on its retry stream
--
-- Cost     O(log n + size of a body), n = dead letters
-- Repeat   idempotent: the second call returns GONE
-- @include _groups
-- @include _fields
-- @include _lists

local dlq, target, moving = KEYS[1], KEYS[2], KEYS[3]
local dead_letter_id, group, changed = ARGV[1], ARGV[2], slice(ARGV, 3, #ARGV)

-- Fields that settle_dead and its caller add, except the fields that an entry also has.
local DEAD_ONLY = {
  originalTopic = true, originalPartition = true, timestamp = true, group = true, instance = true,
  handler = true, attempts = true, crashes = true, reason = true, errorClass = true,
  errorMessage = true, traceback = true, fingerprint = true, signal = true, exitCode = true,
  rss = true, pid = true, failedAt = true,
}

local letter = redis.call('XRANGE', dlq, dead_letter_id, dead_letter_id)[1]
if not letter then
  return {'GONE'}
end
redis.call('XLEN', target)
local mark = redis.call('HGET', moving, dead_letter_id)
if mark then
  return {'MOVING', string.match(mark, '^%d+ (.*)$') or mark}
end
if group ~= '' then
  local owner = named(letter[2])['group'] or ''
  if owner ~= group then
    return {'MISMATCH', owner}
  end
  if not group_on(target, group) then
    return {'NOGROUP'}
  end
end

-- No writes above this line
local new_id = redis.call('XADD', target, '*', unpack(merged(letter[2], changed, DEAD_ONLY)))
redis.call('XDEL', dlq, dead_letter_id)
return {'OK', new_id}
