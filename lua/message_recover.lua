-- message_recover: in-flight (some connection) -> in-flight (this connection), page by page
--
-- List the pending entries of the owner, oldest first, with their bodies and counters. A worker
-- does this when it starts and when it reconnects.
--
-- With the first page, the script also opens a session by writing its name to the fence. This
-- matters if a fetch that was sent on an earlier connection arrives late. If it arrives before the
-- session is written, its entries are part of the list, and if it arrives later, Redis rejects it.
-- In both cases, the worker misses no entry.
--
-- If an entry is missing, because its body was trimmed or deleted, the script returns it without
-- fields. If the group does not exist, the script raises NOGROUP, as a read would.
--
-- KEYS[1]  fence        HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry        STREAM  stream:topic:{T:p:i}:retry:G
-- KEYS[4]  attempts     HASH    streaming:mq:attempts:{T:p:i}:G
--
-- ARGV[1]  token        token   token of the owner
-- ARGV[2]  session      token   name of the session, which is a new random value for each
--                               connection
-- ARGV[3]  group        str     consumer group
-- ARGV[4]  open         flag    1 for the first page, so that the script writes the session
-- ARGV[5]  after_main   id      list the entries of the partition stream after this ID, or '' to
--                               start at the first one
-- ARGV[6]  after_retry  id      the same ID for the retry stream
-- ARGV[7]  count        int     maximum number of entries to list for each stream
--
-- Returns  OK      the entries are listed
--                  [2] 1 if the assignment is in quarantine
--                  [3] last ID delivered to the group from the partition stream
--                  [4] last ID delivered to the group from the retry stream
--                  [5] entries of the partition stream, each with its ID, its fields or nil, the
--                  number of crashes, the number of failures, the context of the last crash, and
--                  the milliseconds until its next run in place is due. A number that cannot be
--                  read is returned as -1
--                  [6] entries of the retry stream, in the same form
--                  [7] 1 if there may be more entries in the partition stream
--                  [8] 1 if there may be more entries in the retry stream
--                  [9] places (`m:ID` or `r:ID`) of the entries that were running when a host was
--                  lost, separated by spaces, or '' if there are none
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(count x log n), where n is the number of pending entries. The script reads at most 1
--          MiB of bodies plus two more
-- Repeat   idempotent: the second call returns the same list and keeps the session. The script
--          works when memory is full
-- @include _clock
-- @include _byte_limit
-- @include _fence
-- @include _groups
-- @include _ids
-- @include _ranges
-- @include _numbers

local fence, stream, retry, attempts = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, session, group, open = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local after_main, after_retry, count = ARGV[5], ARGV[6], tonumber(ARGV[7])

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local on_stream = read_group(stream, group)
local on_retry = read_group(retry, group)
if not on_stream or not on_retry then
  return redis.error_reply('NOGROUP the group ' .. group .. ' is not on ' .. stream)
end
local counted = redis.call('HLEN', attempts) > 0
local now = now_unix_ms()

local function page(source, letter, after)
  local entries, size = {}, 0
  local rows = pending_after(source, group, after == '' and '0-0' or after, count, 'w')
  for _, row in ipairs(rows) do
    if size >= BYTES_MAX then
      break
    end
    local id = row[1]
    local place = letter .. ':' .. id
    local found = redis.call('XRANGE', source, id, id)
    local kept = {}
    if counted then
      local names = {place .. ':c', place .. ':f', place .. ':last', place .. ':due'}
      kept = redis.call('HMGET', attempts, unpack(names))
    end
    local fields = found[1] and found[1][2] or false
    size = size + fields_size(fields or {})
    local crashes, failures, due = to_int(kept[1]), to_int(kept[2]), to_int(kept[4])
    local wait = due and math.max(0, due - now) or -1
    entries[#entries + 1] = {id, fields, crashes or -1, failures or -1, kept[3] or '', wait}
  end
  return entries, (#rows == count or #entries < #rows) and 1 or 0
end

local main_entries, main_more = page(stream, 'm', after_main)
local retry_entries, retry_more = page(retry, 'r', after_retry)
local quarantine = redis.call('HEXISTS', fence, 'quarantine')
local accused = redis.call('HGET', fence, 'accused') or ''

-- No writes above this line
if open == '1' then
  -- HDEL is first because Redis accepts it when memory is full, and then accepts HSET too.
  redis.call('HDEL', fence, 'session')
  redis.call('HSET', fence, 'session', session)
end
local last_main, last_retry = on_stream['last-delivered-id'], on_retry['last-delivered-id']
return {
  'OK',
  quarantine,
  last_main,
  last_retry,
  main_entries,
  retry_entries,
  main_more,
  retry_more,
  accused,
}
