-- message_append: nothing -> ready
--
-- Write messages to one partition, in their order, if the topic has the number of partitions by
-- which they were routed. Check and writes are one step: no message goes to a partition that its
-- key has left, or to a topic that is gone.
--
-- KEYS[1]  stream      STREAM  stream:topic:{T:p:i}
-- KEYS[2]? meta        HASH    streaming:mq:topic:{T}:meta      not on a cluster: another slot
--
-- ARGV[1]  partitions  int     the number of partitions by which the messages were routed
-- ARGV[2]  alone       flag    1 = each message is its payload and nothing else
-- ARGV[3..] messages   list    the payloads; otherwise of each message: how many names and values
--                              it has, then these
--
-- Returns  OK     written     [2..] ids; a list of them if the last is an error, behind which no
--                             more is written
-- Returns  MOVED  the topic has another number of partitions, or is gone    [2] the number, or ''
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

-- Guards end here
local ids = write(stream, alone, messages, #ARGV)
if type(ids[#ids]) == 'table' then
  return {'OK', ids}
end
-- As one string: the server takes longer to write a list.
return 'OK ' .. table.concat(ids, ' ')
