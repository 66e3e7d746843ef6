-- message_reclaim: in-flight (a foreign client's) -> in-flight (the owner's)
--
-- Take over what a client that is not streamqd read from the group and left pending. Only names
-- other than the owner's are looked at: its own slow entries are idle too, and running. An idle
-- entry without a body is acknowledged and counted. A missing group is the server's own error
-- NOGROUP, as for a read. The session is compared as well: a late copy from a connection given up
-- would take over entries after the list of pending ones was read, and nobody would handle them.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  source   STREAM  stream:topic:{T:p:i}, or its :retry:G
--
-- ARGV[1]  token    token   the owner's
-- ARGV[2]  session  token   the one that message_recover opened
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  idle_ms  int     pending for so long without being touched
-- ARGV[5]  count    int     at most so many; fewer come when they are large
--
-- Returns  OK       [2] entries, each id, fields [3] ghosts acknowledged
-- Returns  SESSION  a newer connection has opened a session
-- Returns  FENCED   another owner, or none      [2] epoch [3] owner
--
-- Cost     O(c + count x log n) + 512 KiB of bodies at most and one more, n = pending entries, c =
--          foreign consumers (512 are looked at)
-- Repeat   safe; after a lost reply message_recover lists what was taken
-- @include _bytes
-- @include _fence
-- @include _groups

local fence, source = KEYS[1], KEYS[2]
local token, session, group = ARGV[1], ARGV[2], ARGV[3]
local idle_ms, count = ARGV[4], tonumber(ARGV[5])

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
if redis.call('HGET', fence, 'session') ~= session then
  return {'SESSION'}
end
if not group_on(source, group) then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. source)
end
local entries, ids, ghosts = {}, {}, {}
local looked, size = 0, 0
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', source, group)) do
  local consumer = named(flat)
  local room = count - #ids - #ghosts
  if room > 0 and looked < 512 and consumer['name'] ~= 'w' and consumer['pending'] > 0 then
    looked = looked + 1
    local name = consumer['name']
    local rows = redis.call('XPENDING', source, group, 'IDLE', idle_ms, '-', '+', room, name)
    for _, row in ipairs(rows) do
      if size >= BYTES_MAX then
        break
      end
      local found = redis.call('XRANGE', source, row[1], row[1])
      if found[1] then
        size = size + size_of(found[1][2])
        entries[#entries + 1] = found[1]
        ids[#ids + 1] = row[1]
      else
        ghosts[#ghosts + 1] = row[1]
      end
    end
  end
end

-- Guards end here
for _, id in ipairs(ids) do
  redis.call('XCLAIM', source, group, 'w', 0, id, 'JUSTID')
end
for _, id in ipairs(ghosts) do
  redis.call('XACK', source, group, id)
end
return {'OK', entries, #ghosts}
