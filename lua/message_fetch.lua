-- message_fetch: unread -> in-flight, while the server's memory is full
--
-- Read retries and new entries for the owner while the server's memory is full. Usually, a
-- transaction under WATCH of the fence reads them, because it is faster. However, most servers
-- reject every command of a transaction while their memory is full. Because entries can be trimmed
-- only after they were read, workers must be able to read even then.
--
-- The script compares the session of the owner's connection. Without this comparison, a late copy
-- of the call from an abandoned connection would make entries pending that no worker looks for. A
-- missing group raises NOGROUP, as a read does.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry    STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   session that `message_recover` opened for this connection
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  count    int     read at most this many entries from each stream
--
-- Returns  OK       read
--                   [2] entries of the retry stream, for each: ID, fields
--                   [3] the same for the partition stream
-- Returns  SESSION  a newer connection of the owner has opened a session
-- Returns  FENCED   another owner holds the assignment, or none does
--                   [2] epoch in the fence
--                   [3] owner in the fence, or ''
--
-- Cost     O(count) plus the size of the bodies
-- Repeat   not idempotent: a second call reads the next entries. After a lost reply,
--          `message_recover` lists the entries that the first call read. Works when memory is full
-- @include _fence
-- @include _groups

local fence, stream, retry = KEYS[1], KEYS[2], KEYS[3]
local token, session, group, count = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
if redis.call('HGET', fence, 'session') ~= session then
  return {'SESSION'}
end
if not group_on(stream, group) or not group_on(retry, group) then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. stream)
end

-- No writes above this line
local found = {[stream] = {}, [retry] = {}}
local reply = redis.call(
  'XREADGROUP', 'GROUP', group, 'w', 'COUNT', count, 'STREAMS', retry, stream, '>', '>')
for _, part in ipairs(reply or {}) do
  found[part[1]] = part[2]
end
return {'OK', found[retry], found[stream]}
