-- schedule_fire: due -> ready, and due again later
--
-- Send the messages of due ticks, and set each schedule to its next tick. The caller computes the
-- next due time in Python. The script compares the due time and the specification that the caller
-- saw with the stored ones, and uses the server's clock to check that the time has come. It then
-- writes the message and the next due time in the same step. No fence is necessary: any housekeeper
-- may try to send a tick, and only the first call succeeds.
--
-- KEYS[1]  due         ZSET    streaming:mq:schedule:due:{T:p:i}     names of schedules, sorted by
--                              due time
-- KEYS[2]  schedules   HASH    streaming:mq:schedule:{T:p:i}         specification and state of
--                              each schedule
-- KEYS[3]  last        HASH    streaming:mq:schedule:last:{T:p:i}    last message and counters of
--                              each schedule
-- KEYS[4]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[5]? meta        HASH    streaming:mq:topic:{T}:meta           not on a cluster, where the
--                              key is in another slot
-- KEYS[6]? retry       STREAM  stream:topic:{T:p:i}:retry:G          only with a group
-- KEYS[7]? delayed     ZSET    streaming:mq:retry:{T:p:i}:G          only with a group
-- KEYS[8]? items       HASH    streaming:mq:retry:item:{T:p:i}:G     only with a group
--
-- ARGV[1]  partitions  int     partition count by which the keys of the messages were routed
-- ARGV[2]  group       str     send no message while this group has not finished the previous
--                              message of the schedule, or '' to always send
-- ARGV[3]  orphan_ms   int     time after which a schedule does not fire if no instance has
--                              declared it
-- ARGV[4..] ticks      list    for each tick: name of the schedule, hash of its specification, due
--                              time, tick or '' to send no message, next due time or '', number of
--                              ticks skipped before it, and then field_count and that many names
--                              and values
--
-- Returns  OK     the ticks were processed
--                 [2] a word for each tick, from the list below
--                 [3] server time in Unix milliseconds
-- Returns  MOVED  the topic now has a different partition count, or does not exist, so nothing was
--                 done
--                 [2] current partition count, or 0 if the topic does not exist
--
-- Entry    FIRED     the message was written
-- Entry    SKIPPED   the schedule advanced without a message, as the caller requested
-- Entry    SENT      the schedule advanced without a message, because this tick or a later one was
--                    sent before
-- Entry    OVERLAP   the schedule advanced without a message, because the group has not finished
--                    the previous one
-- Entry    STALE     the schedule is not due at the given time, because another housekeeper was
--                    first, or because it is held or was removed
-- Entry    CHANGED   the specification has changed
-- Entry    EARLY     the schedule is not due yet by the server's clock
-- Entry    ORPHANED  no instance has declared the schedule for `orphan_ms`
--
-- Cost     O(t x log n) plus the size of the bodies, where t is the number of ticks and n the
--          number of schedules. With a group, also at most 200 reads for each tick
-- Repeat   idempotent: the second call returns STALE for each tick
-- @include _clock
-- @include _groups
-- @include _ids
-- @include _lists
-- @include _numbers
-- @include _unfinished

local due, schedules, last, stream, meta = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local retry, delayed, items = KEYS[6], KEYS[7], KEYS[8]
local partitions, group, orphan_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local ticks = slice(ARGV, 4, #ARGV)

if meta ~= due then
  local count = redis.call('HGET', meta, 'partitionCount')
  if count ~= partitions then
    return {'MOVED', count or '0'}
  end
end
redis.call('XLEN', stream)

local now = now_unix_ms()
local moved, written = {}, {}
local function decide(step)
  local name = step.name
  local score = moved[name] or redis.call('ZSCORE', due, name)
  local number = score and tonumber(score)  -- not rounded: a score of 1.5 advances too
  local hash, seen = unpack(redis.call('HMGET', schedules, name .. ':hash', name .. ':seen'))
  local id, sent = unpack(redis.call('HMGET', last, name .. ':id', name .. ':tick'))
  if not number or tonumber(text(number)) ~= tonumber(step.due) then
    step.word = 'STALE'
  elseif hash ~= step.hash then
    step.word = 'CHANGED'
  elseif number > now then
    step.word = 'EARLY'
  elseif seen and now - (to_int(seen) or 0) > orphan_ms then
    step.word = 'ORPHANED'
  elseif step.tick == '' then
    step.word = 'SKIPPED'
  elseif tonumber(step.tick) <= (written[name] or sent and to_int(sent) or -1) then
    step.word = 'SENT'
  else
    local busy = group ~= '' and (written[name]
      or id and is_unfinished(stream, retry, delayed, items, group, id))
    step.word = 'FIRED'
    if busy then
      step.word = 'OVERLAP'
    end
    written[name] = tonumber(step.tick)
  end
  return ({FIRED = 1, SKIPPED = 1, SENT = 1, OVERLAP = 1})[step.word]
end

local steps, words, at = {}, {}, 1
while at <= #ticks do
  local name, hash, score, tick, following, left_out = unpack(ticks, at, at + 5)
  local first, ends = at + 7, at + 6 + tonumber(ticks[at + 6])
  local step = {name = name, hash = hash, due = score, tick = tick, word = false,
    following = following, left_out = tonumber(left_out), body = slice(ticks, first, ends)}
  if decide(step) then
    moved[name] = following
    steps[#steps + 1] = step
  end
  words[#words + 1] = step.word
  at = ends + 1
end

-- No writes above this line
for _, step in ipairs(steps) do
  local name = step.name
  if step.word == 'FIRED' then
    local id = redis.call('XADD', stream, '*', unpack(step.body))
    local late = text(math.max(0, now - tonumber(step.due)))
    redis.call('HSET', last, name .. ':tick', step.tick, name .. ':id', id, name .. ':late', late)
    increment(last, name .. ':fired', 1)
  end
  local left_out = step.left_out + (step.word == 'OVERLAP' and 1 or 0)
  if left_out > 0 then
    increment(last, name .. ':skipped', left_out)
  end
  if step.following == '' then
    redis.call('ZREM', due, name)
  else
    redis.call('ZADD', due, step.following, name)
  end
end
return {'OK', words, text(now)}
