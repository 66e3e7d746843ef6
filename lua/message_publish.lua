-- message_publish: nothing -> ready
--
-- Write messages as message_append does, with a dedup id or a limit of the backlog. A message with
-- a dedup id is not written if that was used before. With a limit, messages are written as long as
-- fewer than that wait.
--
-- The backlog is that of the group that is furthest behind:
-- its pending entries and those that it has not read. Entries that only wait for trimming do not
-- count. Without a group, all entries do. Where the server does not know how many are unread (Redis
-- 6.2, a group that was set to the middle by hand) it is estimated from the times of first, last
-- read and last entry.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta         HASH    streaming:mq:topic:{T}:meta          not on a cluster: another slot
-- KEYS[3]? dedup        STRING  streaming:mq:dedup:{T:p:i}:<id>      only with one message
--
-- ARGV[1]  partitions   int     the topic's number of partitions by which the messages were routed
-- ARGV[2]  window_ms    int     how long the dedup id is remembered
-- ARGV[3]  max_backlog  int     write none when so many entries wait; -1 = no limit
-- ARGV[4]  alone        flag    1 = each message is its payload and nothing else
-- ARGV[5..] messages    list    the payloads; otherwise of each message: how many names and values
--                               it has, then these
--
-- Returns  OK     written, all or the first ones     [2] their ids; an error may be the last one
--                 [3] the backlog for which there is no room for the others, '' otherwise
-- Returns  DUP    written before under the dedup id  [2] id of that entry (or scheduled send)
-- Returns  FULL   the backlog is at its limit        [2] backlog
-- Returns  MOVED  the topic has another number of partitions, or is gone     [2] the number, or ''
--
-- Cost     O(m) + size of the bodies, m = messages; with a limit, when so many entries are there:
--          O(g), g = groups, and the size of a body, of one more for each group whose unread
--          entries are estimated
-- Repeat   safe with a dedup id: answers DUP within the window. Without one it writes again
-- @include _routed
-- @include _write
-- @include _groups
-- @include _ids

local stream, meta, dedup = KEYS[1], KEYS[2], KEYS[3]
local partitions, window_ms, max_backlog = ARGV[1], ARGV[2], tonumber(ARGV[3])
local alone, messages = ARGV[4], 5

local function unread(group, length, last)
  local read = group['last-delivered-id']
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

local function waiting(length)
  local groups, backlog = groups_of(stream), 0
  if #groups == 0 then
    return length
  end
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  for _, group in ipairs(groups) do
    backlog = math.max(backlog, group['pending'] + (last and unread(group, length, last[1]) or 0))
  end
  return math.min(backlog, length)
end

local present = moved(meta, stream, partitions)
if present then
  return {'MOVED', present}
end
if dedup ~= stream then
  local earlier = redis.call('GET', dedup)
  if earlier then
    return {'DUP', earlier}
  end
end
local room, backlog = #ARGV, ''
if max_backlog >= 0 then
  local length = redis.call('XLEN', stream)
  if length + (#ARGV - messages + 1) / (alone == '1' and 1 or 3) > max_backlog then
    backlog = waiting(length)
    room = max_backlog - backlog
    if room <= 0 then
      return {'FULL', backlog}
    end
  end
end

-- Guards end here
local ids, left = write(stream, alone, messages, room)
if dedup ~= stream then
  redis.call('SET', dedup, ids[1], 'PX', window_ms)
end
return {'OK', ids, left <= #ARGV and backlog or ''}
