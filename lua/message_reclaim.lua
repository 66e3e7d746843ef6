-- message_reclaim: in-flight (another client) -> in-flight (the owner)
--
-- Take over entries that a client other than streamqd has read from the group and left pending. A
-- call examines one page of the other clients' entries, and returns the start of the next page.
--
-- - The script examines every entry of a page, idle or not. If it asked the server for idle entries
--   only, the server would search through all others in one command.
-- - It never examines the owner's own consumer. A slow entry of the owner is idle too, but it is
--   still running.
-- - It acknowledges and counts an idle entry without a body.
-- - It treats an entry without a consumer as idle. XNACK of Redis 8.8 leaves such entries, with the
--   consumer name '' and an idle time of -1. They are missing from the server's list of consumers.
--   If the group has more pending entries than its consumers together, the script therefore
--   searches all pending entries for them.
-- - It compares the session of the owner's connection. Without this comparison, a late copy of the
--   call from an abandoned connection could take over entries after the worker has listed its
--   pending entries, and no worker would handle them.
-- - A missing group raises NOGROUP, as a read does.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  source   STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   session that `message_recover` opened for this connection
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  idle_ms  int     minimum time since the entry was last delivered
-- ARGV[5]  count    int     take over at most this many entries, or fewer if they are large
-- ARGV[6]  at_name  bytes   consumer at which the page starts, '' = entries without a consumer
-- ARGV[7]  after    bytes   start after this entry of that consumer, '' = start at the first entry
--                           of the first consumer
--
-- Returns  OK       taken over
--                   [2] entries, for each: ID, fields
--                   [3] number of missing entries acknowledged
--                   [4] start of the next page: name and ID, or an empty list at the end
-- Returns  SESSION  a newer connection of the owner has opened a session
-- Returns  FENCED   another owner holds the assignment, or none does
--                   [2] epoch in the fence
--                   [3] owner in the fence, or ''
--
-- Cost     O(c + (count + 512) x log n), and reads at most 512 KiB of bodies plus one more body; n
--          = pending entries, c = consumers
-- Repeat   safe: after a lost reply, `message_recover` lists the entries that were taken over.
--          Works when memory is full
-- @include _byte_limit
-- @include _fence
-- @include _groups
-- @include _ids
-- @include _ranges
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
local entries, ids, missing, looked, size = {}, {}, {}, 0, 0

-- Take one more idle entry. Returns true if the page can continue after it, or false without room.
local function pass(id)
  if #ids + #missing >= count or size >= BYTES_MAX then
    return false
  end
  local entry = redis.call('XRANGE', source, id, id)[1]
  if entry then
    size = size + size_of(entry[2])
    entries[#entries + 1] = entry
  end
  table.insert(entry and ids or missing, id)
  return true
end

-- Walk through a consumer's entries. Returns the place where the page stops, or nil after the last
-- entry. For entries without a consumer (name ''), all pending entries are searched.
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
    -- Each consumer counts as a row, so many consumers with few entries do not make a long page.
    looked = looked + 1
  end
end
local goes_on = at_name == '' and after ~= ''
if not stop and (here or goes_on) and unowned > 0 then
  stop = walk('', goes_on and after or '0-0')
end

-- No writes above this line
if #ids > 0 then
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', source, group, 'w', 0, unpack(ids))
end
acknowledge(source, group, missing)
return {'OK', entries, #missing, stop or {}}
