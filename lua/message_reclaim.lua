-- message_reclaim: in-flight (a foreign client's) -> in-flight (the owner's)
--
-- Take over what a client that is not streamqd read from the group and left pending. Only names
-- other than the owner's are looked at: its own slow entries are idle too, and running. An idle
-- entry without a body is acknowledged and counted. An entry that no consumer has (XNACK of Redis
-- 8.8 leaves it so, with the name '' and an idle time of -1) counts as idle forever; no list of
-- consumers has it, so it is looked for among all that is pending, when the server counts more of
-- that than the consumers hold. Looks at a page of what those clients hold, busy
-- or not, and says where the next page begins: to ask the server for idle entries alone would let it
-- go through all that are not. A missing group is the server's own error NOGROUP, as for a read. The
-- session is compared as well: a late copy from a connection given up would take over entries after
-- the list of pending ones was read, and nobody would handle them.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  source   STREAM  stream:topic:{T:p:i}, or its :retry:G
--
-- ARGV[1]  token    token   the owner's
-- ARGV[2]  session  token   the one that message_recover opened
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  idle_ms  int     pending for so long without being touched
-- ARGV[5]  count    int     take at most this many; fewer come when they are large
-- ARGV[6]  at_name  bytes   the consumer at which the page begins; '' = what no consumer has
-- ARGV[7]  after    bytes   behind this entry of it; '' = begin with the first entry of the first
--
-- Returns  OK       [2] entries, each id, fields [3] ghosts acknowledged [4] where the next page
--                   begins, name and id; empty at the end
-- Returns  SESSION  a newer connection has opened a session
-- Returns  FENCED   another owner, or none      [2] epoch [3] owner
--
-- Cost     O(c + (count + 512) x log n) + 512 KiB of bodies at most and one more, n = pending
--          entries, c = consumers
-- Repeat   safe; after a lost reply message_recover lists what was taken
-- @include _bytes
-- @include _fence
-- @include _groups
-- @include _ids
-- @include _after
-- @include _lists
-- @include _places

local fence, source = KEYS[1], KEYS[2]
local token, session, group = ARGV[1], ARGV[2], ARGV[3]
local idle_ms, count = tonumber(ARGV[4]), tonumber(ARGV[5])
local at_name, after = ARGV[6], ARGV[7]
local LOOKED_MAX = 512

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
if redis.call('HGET', fence, 'session') ~= session then
  return {'SESSION'}
end
local on_source = group_on(source, group)
if not on_source then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. source)
end
local entries, ids, ghosts, looked, size = {}, {}, {}, 0, 0

-- Take one more idle entry: whether it may be left behind. It stays when there is no room for it.
local function pass(id)
  if #ids + #ghosts >= count or size >= BYTES_MAX then
    return false
  end
  local entry = redis.call('XRANGE', source, id, id)[1]
  if entry then
    size = size + size_of(entry[2])
    entries[#entries + 1] = entry
  end
  table.insert(entry and ids or ghosts, id)
  return true
end

-- Look at what a consumer holds behind an entry. Answers where the page ends, nothing at the end.
-- What no consumer has, of the name '', is among all that is pending.
local function walk(name, behind)
  local rows, asked
  local filter = name ~= '' and {name} or {}
  repeat
    asked = math.min(128, LOOKED_MAX - looked)
    if asked <= 0 then
      return {name, behind}
    end
    rows = pending_after(source, group, behind, asked, unpack(filter))
    for _, row in ipairs(rows) do
      local idle = row[2] == name and (name == '' or row[3] >= idle_ms)
      if idle and not pass(row[1]) then
        return {name, behind}
      end
      looked, behind = looked + 1, row[1]
    end
  until #rows < asked
  return nil
end

local here, stop, unowned = after == '', nil, on_source['pending']
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', source, group)) do
  local consumer = named(flat)
  local name, holds = consumer['name'], consumer['pending']
  here = here or name == at_name
  unowned = unowned - (name ~= '' and holds or 0)
  if here and not stop and name ~= 'w' and name ~= '' and holds > 0 then
    stop = walk(name, name == at_name and after ~= '' and after or '0-0')
    -- Every one counts, so that many with little to see do not make a long page.
    looked = looked + 1
  end
end
local goes_on = at_name == '' and after ~= ''
if not stop and (here or goes_on) and unowned > 0 then
  stop = walk('', goes_on and after or '0-0')
end

-- Guards end here
if #ids > 0 then
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', source, group, 'w', 0, unpack(ids))
end
acknowledge(source, group, ghosts)
return {'OK', entries, #ghosts, stop or {}}
