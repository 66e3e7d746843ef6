-- sink_publish: staged -> ready, each row once
--
-- Move rows that a task attempt has staged into their partition, oldest first. The script writes
-- rows to the partition and removes them from the staged stream in one step, so every row is always
-- in exactly one of the two streams. The stream of staged rows is kept even when it is empty,
-- because it proves that every row was moved. It is needed until `sink_finish` has recorded the end
-- of the batch.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  staged  STREAM  streaming:mq:sink:{T:p:i}:Q:A
--
-- ARGV[1]  limit   int     maximum number of rows to move, at least 1. The script also stops after
--                          512 KiB, but moves at least one row
-- ARGV[2]  ttl_ms  int     how long the remaining rows are kept, from this call
--
-- Returns  OK    the rows were moved
--                [2] number of rows moved
--                [3] number of rows left
-- Returns  GONE  the stream of staged rows does not exist
--
-- Cost     O(r) plus the size of the bodies, where r is the number of rows
-- Repeat   safe: a second call moves the next rows. The script works when memory is full
-- @include _byte_limit
-- @include _ids
-- @include _ranges

local stream, staged = KEYS[1], KEYS[2]
local limit, ttl_ms = tonumber(ARGV[1]), ARGV[2]

-- Number of rows per read. A call can exceed the byte limit by this many bodies.
local PIECE = 4

if redis.call('EXISTS', staged) == 0 then
  return {'GONE'}
end
redis.call('XLEN', stream)
local rows, size, after, page = {}, 0, '0-0', nil
repeat
  page = entries_after(staged, after, '+', math.min(PIECE, limit - #rows))
  for _, row in ipairs(page) do
    if #rows == 0 or size < BYTES_MAX then
      rows[#rows + 1], after, size = row[2], row[1], size + fields_size(row[2])
    end
  end
until #page == 0 or #rows == limit or size >= BYTES_MAX
local left = redis.call('XLEN', staged)

-- No writes above this line
-- PEXPIRE is first because Redis accepts it when memory is full, and then accepts later writes too.
-- This is safe, because moving rows takes no more memory.
redis.call('PEXPIRE', staged, ttl_ms)
local moved, refused = 0, nil
for _, fields in ipairs(rows) do
  local added = redis.pcall('XADD', stream, '*', unpack(fields))
  refused = added.err and added
  if refused then
    break
  end
  moved = moved + 1
end
if moved > 0 then
  -- Staged rows are never removed from the middle, so the rows that were moved are the oldest.
  redis.call('XTRIM', staged, 'MAXLEN', left - moved)
end
if refused then
  return refused
end
return {'OK', moved, left - moved}
