-- message_append: nothing -> ready
--
-- Write messages to one partition, in order, if the topic still has the partition count by which
-- they were routed. Check and writes are one step, so no message is written to a partition that its
-- key has left, or to a deleted topic.
--
-- KEYS[1]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta        HASH    streaming:mq:topic:{T}:meta      not on a cluster: another slot
--
-- ARGV[1]  partitions  int     partition count by which the messages were routed
-- ARGV[2]  alone       flag    1 = each message is only its payload
-- ARGV[3..] messages   list    the payloads; without `alone`, for each message: the number
--                              of its names and values, then the names and values
--
-- Returns  OK     written     [2..] ids; if the server rejected a message, one list of them with
--                 the error last, and no later message is written
-- Returns  MOVED  the topic has a different partition count, or none    [2] the count, or ''
--
-- Cost     O(m) + size of the bodies, m = messages
-- Repeat   writes again
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
-- One string: the server takes longer to encode a list.
return 'OK ' .. table.concat(ids, ' ')
