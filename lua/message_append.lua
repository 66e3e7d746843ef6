-- message_append: nothing -> ready
--
-- Write messages to one partition, in order, if the topic still has the partition count by which
-- the producer routed them. The script compares the count and writes in one step. A message can
-- therefore neither reach a partition that its key has left because the topic has grown, nor a
-- topic that was deleted.
--
-- KEYS[1]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta        HASH    streaming:mq:topic:{T}:meta    not on a cluster, where the key is in
--                              another slot
--
-- ARGV[1]  partitions  int     partition count by which the messages were routed
-- ARGV[2]  alone       flag    1 if each message consists of its payload only
-- ARGV[3..] messages   list    the payloads if `alone` is set. Otherwise, for each message, the
--                              number of its names and values, followed by these names and values
--
-- Returns  OK     the messages were written
--                 [2..] IDs of the entries. If the server rejected a message, this is a single list
--                 instead, which contains the IDs of the entries before it and then the error. No
--                 later message was written in that case
-- Returns  MOVED  the topic now has a different partition count, or does not exist
--                 [2] current partition count, or '' if the topic does not exist
--
-- Cost     O(m) plus the size of the bodies, where m is the number of messages
-- Repeat   not idempotent: a second call writes the messages again
-- @include _routed
-- @include _write

local stream, meta = KEYS[1], KEYS[2]
local partitions, alone, messages = ARGV[1], ARGV[2], 3

local present = find_new_count(meta, stream, partitions)
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
