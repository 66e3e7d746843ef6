-- The record of trimming, written with the trim itself: a server does not say what a trim removed.
-- Needs _groups, _ids. Fields that keep their value are not written again.

local function note_trim(stream, trim, removed, record)
  if removed > 0 then
    redis.call('HINCRBY', trim, 'removed', removed)
  end
  local info = named(redis.call('XINFO', 'STREAM', stream))
  local first = info['first-entry'] and info['first-entry'][1]
  record['first'] = first or successor(info['last-generated-id'])
  record['size'] = string.format('%.0f', info['length'])
  for name, value in pairs(record) do
    if redis.call('HGET', trim, name) ~= value then
      redis.call('HSET', trim, name, value)
    end
  end
end
