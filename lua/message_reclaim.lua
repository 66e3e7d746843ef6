-- message_reclaim: in-flight (another client) -> in-flight (the owner)
--
-- Take over entries that a client other than streamqd has read from the group and left pending. A
-- call examines one page of the other clients' entries, and returns the start of the next page.
--
-- - The script examines every entry of a page, idle or not. If it asked the server for idle entries
--   only, a single command would have to search through all others.
-- - It never examines the owner's own consumer, because an entry that the owner is still running
--   counts as idle too if it is slow.
-- - If an idle entry no longer has a body, the script acknowledges it and counts it as missing.
-- - It treats an entry without a consumer as idle. XNACK of Redis 8.8 leaves such entries, with an
--   empty consumer name and an idle time of -1. They are missing from the server's list of
--   consumers. If the group has more pending entries than its consumers together, the script
--   therefore searches all pending entries for them.
-- - It rejects the call if the session is not that of the owner's current connection. Otherwise, a
--   late copy of the call from an abandoned connection could take over entries after the worker has
--   listed its pending entries, and no worker would handle them.
-- - If the group does not exist, the script raises NOGROUP, as a read would.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  source   STREAM  stream:topic:{T:p:i}, or stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   session that `message_recover` opened for this connection
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  idle_ms  int     minimum time since the entry was last delivered
-- ARGV[5]  count    int     maximum number of entries to take over. If the entries are large, the
--                           script takes over fewer
-- ARGV[6]  at_name  bytes   consumer at which the page starts, or '' for the entries without a
--                           consumer
-- ARGV[7]  after    bytes   entry of that consumer after which the page starts, or '' to start at
--                           the first entry of the first consumer
--
-- Returns  OK       the entries were taken over
--                   [2] entries, each with its ID and fields
--                   [3] number of missing entries that were acknowledged
--                   [4] start of the next page, as the name of a consumer and an ID, or an empty
--                   list at the end
-- Returns  SESSION  the owner has opened a session on a newer connection
-- Returns  FENCED   the caller does not own the assignment, which has another owner or none
--                   [2] epoch that the fence contains
--                   [3] owner that the fence names, or '' if there is none
--
-- Cost     O(c + (count + 512) x log n), where n is the number of pending entries and c the number
--          of consumers. The script reads at most 512 KiB of bodies plus one more
-- Repeat   safe: after a lost reply, `message_recover` lists the entries that were taken over. The
--          script works when memory is full
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
local on_source = read_group(source, group)
if not on_source then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. source)
end
local entries, ids, missing, looked, size = {}, {}, {}, 0, 0

-- Take one more idle entry. Returns true if the page can continue after it, or false without room.
local function take_entry(id)
  if #ids + #missing >= count or size >= BYTES_MAX then
    return false
  end
  local entry = redis.call('XRANGE', source, id, id)[1]
  if entry then
    size = size + fields_size(entry[2])
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
      if idle and not take_entry(row[1]) then
        return {name, behind}
      end
      looked, behind = looked + 1, row[1]
    end
  until #rows < asked
  return nil
end

local here, stop, unowned = after == '', nil, on_source['pending']
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', source, group)) do
  local consumer = to_table(flat)
  local name, holds = consumer['name'], consumer['pending']
  here = here or name == at_name
  unowned = unowned - (name ~= '' and holds or 0)
  if here and not stop and name ~= 'w' and name ~= '' and holds > 0 then
    stop = walk(name, name == at_name and after ~= '' and after or '0-0')
    -- Each consumer counts as a row, so many consumers with few entries do not make a long page.
    looked = looked + 1
  end
end
local continues = at_name == '' and after ~= ''
if not stop and (here or continues) and unowned > 0 then
  stop = walk('', continues and after or '0-0')
end

-- No writes above this line
if #ids > 0 then
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', source, group, 'w', 0, unpack(ids))
end
acknowledge(source, group, missing)
return {'OK', entries, #missing, stop or {}}
