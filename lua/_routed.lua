-- Whether a topic is still as its messages were routed.

-- The present number of partitions of a topic, as text, if it is another than that by which
-- messages were routed; '' when the topic is gone. On a cluster the meta key is in another slot and
-- missing here.
local function moved(meta, stream, partitions)
  if meta ~= stream then
    local present = redis.call('HGET', meta, 'partitionCount')
    if present ~= partitions and tonumber(present or '') ~= tonumber(partitions) then
      return present or ''
    end
  end
end
