-- The record of trimming. It is written in the same step as the trim, because the server does not
-- record how many entries were removed. Fields that have not changed are not written again. Needs
-- _groups, _ids, _numbers.

local function note_trim(stream, trim, removed, record)
  if removed > 0 then
    increment(trim, 'removed', removed)
  end
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  -- XINFO returns the bodies of the first and the last entry, so it is used for an empty stream
  -- only.
  local info = not first and to_table(redis.call('XINFO', 'STREAM', stream))
  record['first'] = first and first[1] or successor(info['last-generated-id'])
  record['size'] = string.format('%.0f', redis.call('XLEN', stream))
  for name, value in pairs(record) do
    if redis.call('HGET', trim, name) ~= value then
      redis.call('HSET', trim, name, value)
    end
  end
end
