-- retention_measure: read-only
--
-- Return the memory use of a partition and the position of each group. These figures show which
-- entries trimming keeps, and why.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  trim    HASH    streaming:mq:trim:{T:p:i}    the record of trimming
--
-- Returns  OK  the partition was measured
--              [2] length of the stream
--              [3] approximate memory use in bytes, or '' without permission for MEMORY
--              [4] ID of the first entry, or ''
--              [5] last ID that the stream has issued, or ''
--              [6] ID of the last archived entry, or ''
--              [7] `shrink_from` of the record, or ''
--              [8] for each group: its name, number of pending entries, first entry that it keeps
--              or '', number of unread entries or '' if the server does not know it, milliseconds
--              since one of its consumers was last seen or '', number of unread entries ever
--              dropped, and number of pending entries ever dropped
--              [9] first entry that is not archived, or ''
--
-- Cost     O(g x (c + log n)), plus the size of g + 3 bodies and the time to measure 1,000 nodes,
--          where g is the number of groups, c the number of consumers of a group, and n the number
--          of pending entries
-- Repeat   safe, because the script only reads
-- @include _groups
-- @include _ids
-- @include _numbers
-- @include _floors

local stream, trim = KEYS[1], KEYS[2]

local record = redis.call('HMGET', trim, 'archived', 'shrink_from')
if redis.call('EXISTS', stream) == 0 then
  return {'OK', 0, 0, '', '', record[1] or '', record[2] or '', {}, ''}
end
local function first_id_from(id)
  local found = redis.call('XRANGE', stream, id, '+', 'COUNT', 1)[1]
  return found and found[1] or ''
end
local info = to_table(redis.call('XINFO', 'STREAM', stream))
local bytes = redis.pcall('MEMORY', 'USAGE', stream, 'SAMPLES', 1000)
local groups = {}
for at, group in ipairs(read_groups(stream)) do
  local idle = ''
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group['name'])) do
    local seen = to_table(flat)['idle']
    idle = idle == '' and seen or math.min(idle, seen)
  end
  local unread = group['lag'] or ''
  if not older(group['last-delivered-id'], info['last-generated-id']) then
    unread = 0
  end
  local lost = redis.call(
    'HMGET', trim, 'dropped_unread:' .. group['name'], 'dropped_pending:' .. group['name']
  )
  local name, pending = group['name'], group['pending']
  local needs = keeps_unread(group, trim) and first_id_from(group_floor(stream, group)) or ''
  groups[at] = {name, pending, needs, unread, idle, to_int(lost[1]) or 0, to_int(lost[2]) or 0}
end
return {
  'OK',
  info['length'],
  type(bytes) == 'number' and bytes or '',
  info['first-entry'] and info['first-entry'][1] or '',
  info['last-generated-id'],
  record[1] or '',
  record[2] or '',
  groups,
  first_id_from(archive_floor(record[1])),
}
