-- message_fetch: unread -> in-flight, while the server's memory is full
--
-- Read retries and new entries for the owner. Usually, a transaction under WATCH does this, because
-- it is faster. But most servers reject every command of a transaction while their memory is full,
-- and entries can be trimmed only after they have been read. The session is compared because a late
-- copy from an abandoned connection would move entries that no worker looks for. A missing group
-- raises the server's own error NOGROUP, as a read does.
--
-- KEYS[1]  fence    HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream   STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry    STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token    token   token of the owner
-- ARGV[2]  session  token   the session that message_recover opened
-- ARGV[3]  group    str     consumer group
-- ARGV[4]  count    int     at most this many from each stream
--
-- Returns  OK       [2] entries of the retry stream, for each: id, fields [3] the same for the
--                   partition stream
-- Returns  SESSION  a newer connection opened a session
-- Returns  FENCED   another owner, or none     [2] epoch [3] owner
--
-- Cost     O(count x size of a body)
-- Repeat   the second call reads the next entries; after a lost reply, message_recover lists the
--          entries that the first one read. Works when memory is full
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
