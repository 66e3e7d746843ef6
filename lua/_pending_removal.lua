-- Forget the pending entries of a group in several calls. XGROUP DESTROY would free all of them in
-- one command, during which the server serves no other client. Between the calls, a lease keeps
-- other owners away from the partition. Needs _clock, _numbers and _places.

-- Hold the assignment for the calling client, with its own token and a new epoch. A repeated call
-- only extends the lease.

local function hold_assignment(fence, lease, token, ttl_ms, keeper)
  -- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
  redis.call('HDEL', fence, 'mark', 'session', 'quarantine', 'accused')
  local held = redis.call('HMGET', fence, 'token', 'epoch')
  if held[1] ~= token then
    local now = now_unix_ms()
    local epoch = math.max((to_int(held[2]) or 0) + 1, now)
    redis.call(
      'HSET', fence, 'token', token, 'epoch', text(epoch), 'owner', keeper, 'since', text(now)
    )
  end
  redis.call('SET', lease, token, 'PX', ttl_ms)
end

local function count_pending(found)
  return found and found['pending'] or 0
end

-- Forget the oldest pending entries, at most `limit` in total. Each source is a stream with the
-- group on it, or with false if it has no group. Returns the number of entries forgotten on the
-- first source.
local function forget_oldest(sources, limit)
  local first
  for _, source in ipairs(sources) do
    local stream, found = source[1], source[2]
    local ids = {}
    if found and limit > 0 then
      for _, row in ipairs(redis.call('XPENDING', stream, found['name'], '-', '+', limit)) do
        ids[#ids + 1] = row[1]
      end
      acknowledge(stream, found['name'], ids)
    end
    first = first or #ids
    limit = limit - #ids
  end
  return first
end
