-- message_publish: nothing -> ready
--
-- Write a message unless its dedup id was used before, or the backlog is at its limit. Plain sends
-- need no script.
--
-- The backlog is what the group that is furthest behind has still to finish: its pending entries and
-- those that it has not read. Entries that only wait for trimming are none. Without a group it is
-- all that is there. Where the server does not know how many are unread (Redis 6.2, a group that
-- was set to the middle by hand) it is estimated from the times of first, last read and last entry.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]? dedup        STRING  streaming:mq:dedup:{T:p:i}:<id>    only with a dedup id
--
-- ARGV[1]  window_ms    int     how long the dedup id is remembered
-- ARGV[2]  max_backlog  int     refuse when so many entries wait; -1 = no limit
-- ARGV[3..] fields      list    names and values
--
-- Returns  OK    written                             [2] id
-- Returns  DUP   written before under the dedup id   [2] id of that entry (or scheduled send)
-- Returns  FULL  the backlog is at its limit         [2] backlog
--
-- Cost     O(1) + size of the body; with a limit, when so many entries are there: O(g), g = groups,
--          and the size of a body, of one more for each group whose unread entries are estimated
-- Repeat   safe with a dedup id: answers DUP within the window. Without one it writes again
-- @include _groups
-- @include _ids
-- @include _lists

local stream, dedup = KEYS[1], KEYS[2]
local window_ms, max_backlog, fields = ARGV[1], tonumber(ARGV[2]), slice(ARGV, 3, #ARGV)

local last
local function unread(group, length)
  local read = group['last-delivered-id']
  last = last or redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1][1]
  if not older(read, last) then
    return 0
  end
  if group['lag'] then
    return math.min(group['lag'], length)
  end
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1][1]
  local first_ms, read_ms, last_ms = halves(first), halves(read), halves(last)
  local span = last_ms - first_ms
  if older(read, first) then
    return length
  end
  return span > 0 and math.ceil((length - 1) * (last_ms - read_ms) / span) or length - 1
end

if dedup ~= stream then
  local earlier = redis.call('GET', dedup)
  if earlier then
    return {'DUP', earlier}
  end
end
local length = redis.call('XLEN', stream)
if max_backlog >= 0 and length >= max_backlog then
  local groups, backlog = groups_of(stream), 0
  for _, group in ipairs(groups) do
    backlog = math.max(backlog, group['pending'] + unread(group, length))
  end
  if #groups == 0 then
    backlog = length
  end
  if backlog >= max_backlog then
    return {'FULL', backlog}
  end
end

-- Guards end here
local id = redis.call('XADD', stream, '*', unpack(fields))
if dedup ~= stream then
  redis.call('SET', dedup, id, 'PX', window_ms)
end
return {'OK', id}
