-- dead_replay: dead -> ready
--
-- Put a dead letter back, either into the retry stream of its own group, or into the partition,
-- where every group receives it. The script writes the message and deletes the dead letter in one
-- step, so a dead letter cannot be replayed twice.
--
-- The script does not copy the fields that only describe the failure, such as its reason, place and
-- time. It copies all other fields (such as `payload`, `key`, `headers`, `originalId` and the
-- counters) with the changes that the caller passes.
--
-- KEYS[1]  dlq             STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[2]  target          STREAM  stream:topic:{T:p:i}:retry:G, or stream:topic:{T:p:i}
-- KEYS[3]  moving          HASH    streaming:mq:moving:{T:p:i}
--
-- ARGV[1]  dead_letter_id  id      the dead letter
-- ARGV[2]  group           str     group to whose retry stream the message is written, or '' to
--                                  write it to the partition
-- ARGV[3..] changed        list    names and values of the changed fields. The caller sets
--                                  `retryCount` and `crashCount` to 0 and increases `replayCount`
--                                  by 1
--
-- Returns  OK        the dead letter was replayed
--                    [2] ID of the new entry
-- Returns  GONE      the dead letter does not exist, because it was already replayed or purged
-- Returns  MISMATCH  the dead letter belongs to another group
--                    [2] that group
-- Returns  MOVING    the dead letter is moving to another slot
--                    [2] its destination
-- Returns  NOGROUP   the group does not exist on the retry stream, so nothing was written
--
-- Cost     O(log n) plus the size of a body, where n is the number of dead letters
-- Repeat   idempotent: the second call returns GONE
-- @include _groups
-- @include _fields
-- @include _lists

local dlq, target, moving = KEYS[1], KEYS[2], KEYS[3]
local dead_letter_id, group, changed = ARGV[1], ARGV[2], slice(ARGV, 3, #ARGV)

-- The fields that settle_dead and its caller add, except those that other entries can have too.
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
  local owner = to_table(letter[2])['group'] or ''
  if owner ~= group then
    return {'MISMATCH', owner}
  end
  if not read_group(target, group) then
    return {'NOGROUP'}
  end
end

-- No writes above this line
local new_id = redis.call('XADD', target, '*', unpack(merge_fields(letter[2], changed, DEAD_ONLY)))
redis.call('XDEL', dlq, dead_letter_id)
return {'OK', new_id}
