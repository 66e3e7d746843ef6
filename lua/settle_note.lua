-- settle_note: in-flight -> in-flight
--
-- Record the failures of entries that stay with their owner for another run, and the time at which
-- that run is due. If the owner is lost, the next owner continues to count from there, and waits
-- for the rest of the delay. The caller passes the total number of failures, and the script writes
-- it only if it is greater than the stored one, together with the due time. A repeated or late call
-- therefore changes nothing.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry     STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token     token   token of the owner
-- ARGV[2]  group     str     consumer group
-- ARGV[3..] notes    list    for each entry: its place, its total number of failures, and delay_ms,
--                            the milliseconds until its next run
--
-- Returns  OK      the failures are recorded
--                  [2] number of entries that are pending. Nothing is written for the others
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(e x log n), where e is the number of entries and n the number of pending entries
-- Repeat   idempotent: the second call writes nothing
-- @include _clock
-- @include _fence
-- @include _numbers
-- @include _lists
-- @include _places

local fence, stream, retry, attempts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, group = ARGV[1], ARGV[2]
local notes = slice(ARGV, 3, #ARGV)

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
redis.call('HLEN', attempts)
local now = now_unix_ms()
local higher, there = {}, 0
for at = 1, #notes, 3 do
  local place, failures, delay = notes[at], tonumber(notes[at + 1]), tonumber(notes[at + 2])
  local source, id = locate(stream, retry, place)
  if not source then
    return redis.error_reply('ERR not a place: ' .. place)
  end
  if is_entry_pending(source, group, id) then
    there = there + 1
    local noted = to_int(redis.call('HGET', attempts, place .. ':f')) or 0
    if failures > noted then
      higher[#higher + 1] = place .. ':f'
      higher[#higher + 1] = notes[at + 1]
      higher[#higher + 1] = place .. ':due'
      higher[#higher + 1] = text(now + delay)
    end
  end
end

-- No writes above this line
if #higher > 0 then
  redis.call('HSET', attempts, unpack(higher))
end
return {'OK', there}
