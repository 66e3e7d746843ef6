-- Check that a topic still has the partition count by which its messages were routed.

-- Return the current partition count of a topic, as a string, if it differs from the count by which
-- messages were routed, or '' if the topic is gone. Returns nil if they are equal, and on a
-- cluster, where the meta key is in another slot and is not passed.
local function moved(meta, stream, partitions)
  if meta ~= stream then
    local present = redis.call('HGET', meta, 'partitionCount')
    if present ~= partitions and tonumber(present or '') ~= tonumber(partitions) then
      return present or ''
    end
  end
end
