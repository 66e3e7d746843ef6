-- message_append: nothing -> ready
--
-- Write messages to one partition, in order, if the topic still has the partition count by which
-- the producer routed them. The script compares the count and writes in one step. A message can
-- therefore neither reach a partition that its key has left because the topic has grown, nor a
-- topic that was deleted.
--
-- KEYS[1]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta        HASH    streaming:mq:topic:{T}:meta    not on a cluster, where it is in
--                                                             another slot
--
-- ARGV[1]  partitions  int     partition count by which the messages were routed
-- ARGV[2]  alone       flag    1 = each message consists of its payload only
-- ARGV[3..] messages   list    with `alone`, the payloads; otherwise, for each message the number
--                              of its names and values, and then the names and values
--
-- Returns  OK     written
--                 [2..] IDs of the entries; if the server rejected a message, a single list of the
--                 IDs before it and its error, and no later message was written
-- Returns  MOVED  the topic has a different partition count, or does not exist
--                 [2] current count, or ''
--
-- Cost     O(m) plus the size of the bodies; m = messages
-- Repeat   not idempotent: a second call writes the messages again
-- @include _routed
-- @include _write

local stream, meta = KEYS[1], KEYS[2]
local partitions, alone, messages = ARGV[1], ARGV[2], 3

local present = moved(meta, stream, partitions)
if present then
  return {'MOVED', present}
end

-- No writes above this line
local ids = write(stream, alone, messages, #ARGV)
if type(ids[#ids]) == 'table' then
  return {'OK', ids}
end
-- Return one string, because the server takes longer to encode a list.
return 'OK ' .. table.concat(ids, ' ')
