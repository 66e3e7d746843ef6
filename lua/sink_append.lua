-- sink_append: nothing -> ready, once for each row of a batch
--
-- Write the rows that a task of a streaming query has for one partition. The marker says how many of
-- them, in the order of the task, are written already; those are skipped. Each row carries a digest of
-- itself and all before it: when a repeated task has other rows, or the same in another order,
-- nothing may be skipped and nothing written.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  marker  HASH    streaming:mq:sink:{T:p:i}
--
-- ARGV[1]  writer  str     the query and the number of the task in its batch
-- ARGV[2]  batch   int     number of the batch; a writer's batches grow
-- ARGV[3]  first   int     how many rows of the task precede the first of this call
-- ARGV[4..] rows   list    for each row: digest, value_count, that many names and values
--
-- Returns  OK     written, or there before     [2] rows written now
-- Returns  PAST   a later batch was written    [2] its number
-- Returns  GAP    rows before the first of this call are missing    [2] rows that the marker counts
-- Returns  OTHER  these are not the rows of the first try           [2] rows that the marker counts
--
-- Cost     O(r x size of a body), r = rows
-- Repeat   safe: the second writes nothing and answers OK
-- @include _lists
-- @include _numbers

local stream, marker = KEYS[1], KEYS[2]
local writer, batch, first = ARGV[1], ARGV[2], tonumber(ARGV[3])
local rows = slice(ARGV, 4, #ARGV)

local done, digest = 0, ''
local found = redis.call('HGET', marker, writer)
if found then
  local at_batch, at_rows, at_digest = string.match(found, '^(%d+):(%d+):(%w*)$')
  if not at_batch then
    return bad_value(marker, writer, 'a batch, a number of rows and their digest')
  end
  if tonumber(at_batch) > tonumber(batch) then
    return {'PAST', at_batch}
  end
  if at_batch == batch then
    done, digest = tonumber(at_rows), at_digest
  end
end
if done < first then
  return {'GAP', done}
end
local entries = {}
local at, number = 1, first
while at <= #rows do
  local last = at + 1 + tonumber(rows[at + 1])
  number = number + 1
  if number > done then
    entries[#entries + 1] = slice(rows, at + 2, last)
    digest = rows[at]
  elseif number == done and rows[at] ~= digest then
    return {'OTHER', done}
  end
  at = last + 1
end
redis.call('XLEN', stream)

-- Guards end here
for _, fields in ipairs(entries) do
  redis.call('XADD', stream, '*', unpack(fields))
end
if #entries > 0 then
  local text = string.format('%s:%.0f:%s', batch, number, digest)
  redis.call('HSET', marker, writer, text)
end
return {'OK', #entries}
