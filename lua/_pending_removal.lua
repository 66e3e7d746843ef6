-- Forget the pending entries of a group in several calls. XGROUP DESTROY would free them all in one
-- command, during which the server serves no other client. Between the calls, a lease keeps other
-- owners away from the partition. Needs _clock, _numbers and _places.

local function keep(fence, lease, token, ttl_ms, keeper)
  -- HDEL first: it is accepted when memory is full, and so is every write after it.
  redis.call('HDEL', fence, 'mark', 'session', 'quarantine', 'accused')
  local held = redis.call('HMGET', fence, 'token', 'epoch')
  if held[1] ~= token then
    local now = now_unix_ms()
    local epoch = math.max((whole(held[2]) or 0) + 1, now)
    redis.call(
      'HSET', fence, 'token', token, 'epoch', text(epoch), 'owner', keeper, 'since', text(now)
    )
  end
  redis.call('SET', lease, token, 'PX', ttl_ms)
end

local function in_hand(found)
  return found and found['pending'] or 0
end

-- Forget the oldest pending entries, at most `limit` over all sources. A source is a stream and the
-- group on it, or false. Returns the number forgotten on the first source.
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
