-- stream_trim: settled and no longer retained -> gone
--
-- Remove the oldest entries, whole nodes at a time, never one that a group has still to finish.
-- The floor, the smallest id that must stay, is found and used in one step: outside it would be
-- wrong after a group's creation, a reset or a failover. Of a group it is its first pending entry,
-- else what comes after the last delivered one.
--
-- KEYS[1]  stream     STREAM  stream:topic:{T:p:i}, or its :retry:G
-- KEYS[2]? trim       HASH    streaming:mq:trim:{T:p:i}       the record; none for a retry stream
--
-- ARGV[1]  keep_from  id      retention: entries from this id on stay; '' = none stays for its age
-- ARGV[2]  max_len    int     retention: more entries than this go; -1 = no such bound
-- ARGV[3]  archive    flag    1 = what is not archived stays
-- ARGV[4]  limit      int     remove at most so many, 1 or more (a node holds 100)
-- ARGV[5..] expected  list    groups that must exist
--
-- Returns  OK             [2] removed [3] floor [4] the group that holds it, or 'archive'
-- Returns  NO_GROUPS      nobody reads the stream (or there is none)
-- Returns  MISSING_GROUP  an expected group does not exist      [2] its name
--
-- Cost     O(g x log n + limit), g = groups, n = pending entries
-- Repeat   safe: removes the next ones. Works when memory is full
-- @include _groups
-- @include _ids
-- @include _lists

local stream, trim = KEYS[1], KEYS[2]
local keep_from, max_len, archive = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local limit, expected = tonumber(ARGV[4]), slice(ARGV, 5, #ARGV)

local recorded = trim ~= stream
local groups = groups_of(stream)
if #groups == 0 then
  return {'NO_GROUPS'}
end
local present = {}
for _, group in ipairs(groups) do
  present[group['name']] = true
end
for _, group in ipairs(expected) do
  if not present[group] then
    return {'MISSING_GROUP', group}
  end
end

local floor, holder
local record = {}
for _, group in ipairs(groups) do
  local own = successor(group['last-delivered-id'])
  if group['pending'] > 0 then
    own = redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1][1]
  end
  record['floor:' .. group['name']] = own
  if not floor or older(own, floor) then
    floor, holder = own, group['name']
  end
end
local archived = recorded and redis.call('HGET', trim, 'archived')
if archive == '1' then
  local own = archived and successor(archived) or '0-0'
  if older(own, floor) then
    floor, holder = own, 'archive'
  end
end
local keep = floor
if keep_from ~= '' and older(keep_from, floor) then
  keep = keep_from
end

-- Guards end here
-- XTRIM first: accepted when memory is full, and so is every write behind it. `~` removes whole
-- nodes, the last and partly filled one too once all of it may go; part of one would free nothing.
local removed = redis.call('XTRIM', stream, 'MINID', '~', keep, 'LIMIT', limit)
-- A LIMIT of 0 is none.
local excess = math.min(redis.call('XLEN', stream) - max_len, limit - removed)
if max_len >= 0 and excess > 0 then
  removed = removed + redis.call('XTRIM', stream, 'MINID', '~', floor, 'LIMIT', excess)
end
if recorded then
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
return {'OK', removed, floor, holder}
