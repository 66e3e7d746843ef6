-- message_publish: nothing -> ready
--
-- Write a message unless its dedup id was used before, or the backlog is at its limit. Plain sends
-- need no script.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]? dedup        STRING  streaming:mq:dedup:{T:p:i}:<id>    only with a dedup id
-- KEYS[3]? trim         HASH    streaming:mq:trim:{T:p:i}          only with a backlog limit
--
-- ARGV[1]  window_ms    int     how long the dedup id is remembered
-- ARGV[2]  max_backlog  int     refuse when so many entries wait; unused without the trim key
-- ARGV[3..] fields      list    names and values
--
-- Returns  OK    written                             [2] id
-- Returns  DUP   written before under the dedup id   [2] id of that entry (or scheduled send)
-- Returns  FULL  the backlog is at its limit         [2] backlog
--
-- Cost     O(1) + size of the body
-- Repeat   safe with a dedup id: answers DUP within the window. Without one it writes again
-- @include _lists

local stream, dedup, trim = KEYS[1], KEYS[2], KEYS[3]
local window_ms, max_backlog, fields = ARGV[1], tonumber(ARGV[2]), slice(ARGV, 3, #ARGV)

if dedup ~= stream then
  local earlier = redis.call('GET', dedup)
  if earlier then
    return {'DUP', earlier}
  end
end
if trim ~= stream then
  local backlog = tonumber(redis.call('HGET', trim, 'backlog') or 0)
  if backlog >= max_backlog then
    return {'FULL', backlog}
  end
end
redis.call('XLEN', stream)

-- Guards end here
local id = redis.call('XADD', stream, '*', unpack(fields))
if dedup ~= stream then
  redis.call('SET', dedup, id, 'PX', window_ms)
end
return {'OK', id}
