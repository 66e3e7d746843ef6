-- outbox_publish: a row of a database -> ready, or delayed for every group
--
-- Write rows of an outbox to one partition, in order and each row once. For this purpose, the
-- partition has a record of the rows that were written last. The script skips the rows that this
-- record contains, because an earlier call has written them, and in the same step replaces the
-- record with the rows of this call. After a lost reply, the relay can therefore send the same rows
-- again. The record needs to contain only the last batch, because the relay sends the next rows of
-- a partition only after it has deleted the previous ones from its table.
--
-- KEYS[1]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[2]  record       HASH    streaming:mq:outbox:{T:p:i}:N
-- KEYS[3]? meta         HASH    streaming:mq:topic:{T}:meta          not on a cluster, where the
--                               key is in another slot
-- KEYS[4]? scheduled    ZSET    streaming:mq:delayed:{T:p:i}         only with rows that have a due
--                                                                    time
-- KEYS[5]? items        HASH    streaming:mq:delayed:item:{T:p:i}    only with rows that have a due
--                                                                    time
--
-- ARGV[1]  epoch        int     epoch of the relay
-- ARGV[2]  partitions   int     partition count by which the rows were routed
-- ARGV[3]  max_backlog  int     backlog from which no row is written, or -1 for no limit
-- ARGV[4..] rows        list    for each row: 32 hex digits of its uid and 16 hex digits of its ID,
--                               its due time in Unix milliseconds or '', the number of its names
--                               and values, and then these names and values
--
-- Returns  OK        the rows were written
--                    [2] number of rows, counted from the first one, that are now in the topic
--                    [3] number of rows that this call wrote
--                    [4] reason why the next row was not written, which is its error or, if the
--                    limit left no room, the backlog. '' if all rows are written
-- Returns  FULL      the backlog has reached the limit, so nothing was written
--                    [2] backlog
-- Returns  FENCED    a later relay has fenced the partition
--                    [2] epoch of that relay
-- Returns  UNFENCED  this epoch has not fenced the partition, or the record was deleted
-- Returns  MOVED     the topic now has a different partition count, or does not exist
--                    [2] current partition count, or '' if the topic does not exist
--
-- Cost     O(r) plus the size of the bodies, where r is the number of rows. With a limit, the cost
--          that `message_publish` describes is added
-- Repeat   idempotent until the next batch of the partition is written. The script works when
--          memory is full if all rows are in the record
-- @include _clock
-- @include _numbers
-- @include _routed
-- @include _fields
-- @include _lists
-- @include _groups
-- @include _ids
-- @include _backlog
-- @include _outbox

local stream, record, meta = KEYS[1], KEYS[2], KEYS[3]
local scheduled, items = KEYS[4], KEYS[5]
local epoch, partitions, max_backlog = ARGV[1], ARGV[2], tonumber(ARGV[3])
local keys, rows = {stream = stream, scheduled = scheduled, items = items}, 4
local values = #ARGV

local held = redis.call('HMGET', record, 'epoch', 'rows')
local present = to_int(held[1])
if not present then
  return bad_value(record, 'epoch', 'a whole number')
end
if present > tonumber(epoch) then
  return {'FENCED', held[1]}
end
if present < tonumber(epoch) then
  return {'UNFENCED'}
end
local count = find_new_count(meta, stream, partitions)
if count then
  return {'MOVED', count}
end
local recorded = parse_uids(held[2])
local length = redis.call('XLEN', stream)
if scheduled ~= stream then
  redis.call('ZCARD', scheduled)
  redis.call('HLEN', items)
end
local room, backlog = values, ''
if max_backlog >= 0 then
  local new, at = 0, rows
  while at <= values do
    new = new + (recorded[row_uid(ARGV[at])] and 0 or 1)
    at = at + 3 + ARGV[at + 2]
  end
  if length + new > max_backlog then
    backlog = measure_backlog(stream, length)
    room = math.max(0, max_backlog - backlog)
    if room == 0 and new > 0 and not recorded[row_uid(ARGV[rows])] then
      return {'FULL', backlog}
    end
  end
end

-- No writes above this line
local now, call = now_unix_ms(), redis.call
local at, first, added, kept, rest = rows, 0, 0, {}, ''
while at <= values do
  local row, due, last = ARGV[at], ARGV[at + 1], at + 2 + ARGV[at + 2]
  local uid = row_uid(row)
  local stopped = rest ~= ''
  if recorded[uid] then
    kept[#kept + 1] = row
  elseif not stopped and added == room then
    rest = backlog
  elseif not stopped then
    -- If the server rejects the first row, the error is raised. It rejects no later row for memory.
    local result = write_row(call, keys, uid, due, now, at + 3, last)
    if type(result) == 'table' and result.err then
      rest = result
    else
      added, call = added + 1, redis.pcall
      kept[#kept + 1], recorded[uid] = row, true
    end
  end
  first = rest == '' and first + 1 or first
  at = last + 1
end
if added > 0 then
  redis.call('HSET', record, 'rows', table.concat(kept))
end
return {'OK', first, added, rest}
