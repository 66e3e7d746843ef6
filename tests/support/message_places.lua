-- Where the messages of a group on a partition are, by their numbers, at one instant. Reads only.
--
-- A message is known by the first word of its payload, which it keeps wherever it goes; so are the
-- crashes that it is charged with, beside the entry or in its fields.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}
-- KEYS[2]  retry      STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[3]  delayed    ZSET    streaming:mq:retry:{T:p:i}:G
-- KEYS[4]  items      HASH    streaming:mq:retry:item:{T:p:i}:G
-- KEYS[5]  dlq        STREAM  stream:topic:{T:p:i}:dlq
-- KEYS[6]  scheduled  ZSET    streaming:mq:delayed:{T:p:i}
-- KEYS[7]  sitems     HASH    streaming:mq:delayed:item:{T:p:i}
-- KEYS[8]  fence      HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[9]  attempts   HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[10] trim       HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  group      str     consumer group
--
-- Returns  epoch, how many unread and how many pending ones the group has lost to a limit (or nil),
--          numbers with their crashes (only those that have any), then a list of numbers for each
--          place: unread, pending, delayed, retry unread, retry pending, dead, scheduled. '?' stands
--          for one whose body is missing.

local stream, retry, group, charges = KEYS[1], KEYS[2], ARGV[1], {}

local function named(flat)
  local found = {}
  for at = 1, #flat - 1, 2 do
    found[flat[at]] = flat[at + 1]
  end
  return found
end

-- `name` is of the field with the crashes, `beside` how many there are beside the entry.
local function number(fields, name, beside)
  fields = named(fields)
  local found = string.match(fields['payload'] or '', '^%S+') or '?'
  local crashes = tonumber(beside or 0) + tonumber(fields[name] or 0)
  if crashes > 0 then
    charges[#charges + 1], charges[#charges + 2] = found, crashes
  end
  return found
end

local function numbers(entries)
  local found = {}
  for at, entry in ipairs(entries) do
    found[at] = number(entry[2], 'crashCount')
  end
  return found
end

local function unread(source)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', source)) do
    local info = named(flat)
    if info['name'] == group then
      return numbers(redis.call('XRANGE', source, '(' .. info['last-delivered-id'], '+'))
    end
  end
  return {'?'}
end

local function pending(source, prefix)
  local found = {}
  for at, row in ipairs(redis.call('XPENDING', source, group, '-', '+', 100000)) do
    local entry = redis.call('XRANGE', source, row[1], row[1])[1]
    local beside = redis.call('HGET', KEYS[9], prefix .. row[1] .. ':c')
    found[at] = number(entry and entry[2] or {}, 'crashCount', beside)
  end
  return found
end

-- A member without an item, or an item without a member, is no message.
local function waiting(times, items)
  local found = {}
  for at, member in ipairs(redis.call('ZRANGE', times, 0, -1)) do
    local packed = redis.call('HGET', items, member)
    found[at] = packed and number(cmsgpack.unpack(packed), 'crashCount') or '?'
  end
  if redis.call('HLEN', items) ~= #found then
    found[#found + 1] = '?'
  end
  return found
end

local function dead()
  local found = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[5], '-', '+')) do
    if named(entry[2])['group'] == group then
      found[#found + 1] = number(entry[2], 'crashes')
    end
  end
  return found
end

return {
  redis.call('HGET', KEYS[8], 'epoch') or '0',
  redis.call('HMGET', KEYS[10], 'dropped_unread:' .. group, 'dropped_pending:' .. group),
  charges,
  unread(stream), pending(stream, 'm:'), waiting(KEYS[3], KEYS[4]), unread(retry),
  pending(retry, 'r:'), dead(), waiting(KEYS[6], KEYS[7]),
}
