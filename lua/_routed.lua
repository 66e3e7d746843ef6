-- Check that a topic still has the partition count by which its messages were routed.

-- Return the current partition count of a topic, as a string, if it differs from the count by which
-- the messages were routed, or '' if the topic does not exist. Return nil if both counts are equal.
-- Also return nil on a cluster, where the meta key is in another slot and the caller does not pass
-- it.
local function find_new_count(meta, stream, partitions)
  if meta ~= stream then
    local present = redis.call('HGET', meta, 'partitionCount')
    if present ~= partitions and tonumber(present or '') ~= tonumber(partitions) then
      return present or ''
    end
  end
end
