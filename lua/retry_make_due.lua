-- retry_make_due: waiting -> waiting, due now
--
-- Make waiting retries or delayed sends due immediately. `message_promote` then moves them together
-- with all other due items.
--
-- KEYS[1]  delayed  ZSET  streaming:mq:retry:{T:p:i}:G, or streaming:mq:delayed:{T:p:i}
--
-- ARGV[1..] places  list  places of the retries, or send IDs of the delayed sends
--
-- Returns  OK  the due times were changed
--              [2] number of entries that are due now
--              [3] number of entries that were no longer waiting
--
-- Cost     O(p x log n), where p is the number of entries in `places` and n the number of waiting
--          retries
-- Repeat   idempotent: the second call finds the entries due or gone
-- @include _clock

local delayed = KEYS[1]
local places = ARGV

local now = now_unix_ms()
local early, due, gone = {}, 0, 0
for _, place in ipairs(places) do
  local score = redis.call('ZSCORE', delayed, place)
  if not score then
    gone = gone + 1
  else
    due = due + 1
    if tonumber(score) > now then
      early[#early + 1] = place
    end
  end
end

-- No writes above this line
for _, place in ipairs(early) do
  redis.call('ZADD', delayed, 'XX', text(now), place)
end
return {'OK', due, gone}
