-- Where the messages of a group on a partition are, by their numbers, at one instant. Reads only.
--
-- A message is known by the first word of its payload, which it keeps wherever it goes.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry      STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  delayed    ZSET    streaming:mq:retry:{T:p:i}:G
-- KEYS[4]  items      HASH    streaming:mq:retry:item:{T:p:i}:G
-- KEYS[5]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[6]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}
-- KEYS[7]  sitems     HASH    streaming:mq:delayed:item:{T:p:i}
-- KEYS[8]  fence      HASH    streaming:mq:fence:{T:p:i}:G
--
-- ARGV[1]  group      str     consumer group
--
-- Returns  epoch, then a list of numbers for each place: unread, pending, delayed, retry unread,
--          retry pending, dead, scheduled. '?' stands for one whose body is missing.

local stream, retry, group = KEYS[1], KEYS[2], ARGV[1]

local function number(fields)
  for at = 1, #fields - 1, 2 do
    if fields[at] == 'payload' then
      return string.match(fields[at + 1], '^%S+') or '?'
    end
  end
  return '?'
end

local function numbers(entries)
  local found = {}
  for at, entry in ipairs(entries) do
    found[at] = number(entry[2])
  end
  return found
end

local function unread(source)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', source)) do
    local info = {}
    for at = 1, #flat - 1, 2 do
      info[flat[at]] = flat[at + 1]
    end
    if info['name'] == group then
      return numbers(redis.call('XRANGE', source, '(' .. info['last-delivered-id'], '+'))
    end
  end
  return {'?'}
end

local function pending(source)
  local found = {}
  for at, row in ipairs(redis.call('XPENDING', source, group, '-', '+', 100000)) do
    found[at] = numbers(redis.call('XRANGE', source, row[1], row[1]))[1] or '?'
  end
  return found
end

-- A member without an item, or an item without a member, is no message.
local function waiting(times, items)
  local found = {}
  for at, member in ipairs(redis.call('ZRANGE', times, 0, -1)) do
    local packed = redis.call('HGET', items, member)
    found[at] = packed and number(cmsgpack.unpack(packed)) or '?'
  end
  if redis.call('HLEN', items) ~= #found then
    found[#found + 1] = '?'
  end
  return found
end

local function dead()
  local found = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[5], '-', '+')) do
    for at = 1, #entry[2] - 1, 2 do
      if entry[2][at] == 'group' and entry[2][at + 1] == group then
        found[#found + 1] = number(entry[2])
      end
    end
  end
  return found
end

return {
  redis.call('HGET', KEYS[8], 'epoch') or '0',
  unread(stream), pending(stream), waiting(KEYS[3], KEYS[4]), unread(retry), pending(retry),
  dead(), waiting(KEYS[6], KEYS[7]),
}
