-- message_fetch: unread -> in-flight, while the server's memory is full
--
-- Read retries and new entries for the owner while the server's memory is full. Usually, the owner
-- watches the fence with WATCH and reads in a transaction, which is faster. Most servers, however,
-- reject every command of a transaction while their memory is full. Workers must be able to read
-- even then, because an entry can be trimmed only after it was read.
--
-- The script rejects the call if the session is not that of the owner's current connection.
-- Otherwise, a late copy of the call from an abandoned connection could make entries pending that
-- no worker looks for. If the group does not exist, the script raises NOGROUP, as a read would.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry    STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   session that `message_recover` opened for this connection
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  count    int     maximum number of entries to read from each stream
--
-- Returns  OK       the entries were read
--                   [2] entries of the retry stream, each with its ID and fields
--                   [3] entries of the partition stream, in the same form
-- Returns  SESSION  the owner has opened a session on a newer connection
-- Returns  FENCED   the caller does not own the assignment, which has another owner or none
--                   [2] epoch that the fence contains
--                   [3] owner that the fence names, or '' if there is none
--
-- Cost     O(count) plus the size of the bodies
-- Repeat   not idempotent: a second call reads the next entries. After a lost reply,
--          `message_recover` lists the entries that the first call read. The script works when
--          memory is full
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
if not read_group(stream, group) or not read_group(retry, group) then
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
