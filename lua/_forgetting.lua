-- Forgetting what a group has in flight, some in each call: the server frees all of it at once when
-- the group goes, and serves nobody meanwhile. Between the calls the partition is kept from others
-- by a lease like any other. Needs _clock, _numbers and _places.

local function keep(fence, lease, token, ttl_ms, keeper)
  -- HDEL first: accepted when memory is full, and so is every write behind it.
  redis.call('HDEL', fence, 'mark', 'session', 'solo', 'accused')
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

-- Forget the oldest, at most `limit` of all sources, each of them a stream and the group on it, or
-- false. Returns how many of the first source.
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
