-- Writing messages to a partition.

-- Write the messages in ARGV from index `at`, at most `room`. If `alone` is '1', a message is its
-- payload only, otherwise the number of its names and values, then these. Returns their ids, and
-- the index of the first message not written. Stops at an insertion that the server rejects: its
-- error (a table) is the last item of the ids. If the first insertion is rejected, its error is
-- raised.
local function write(stream, alone, at, room)
  local values, count, payloads = ARGV, #ARGV, alone == '1'
  local ids, written, call, id = {}, 0, redis.call, nil
  while at <= count and written < room and type(id) ~= 'table' do
    local last = payloads and at or at + values[at]
    if payloads then
      id = call('XADD', stream, '*', 'payload', values[at])
    else
      id = call('XADD', stream, '*', unpack(values, at + 1, last))
    end
    written, at, call = written + 1, last + 1, redis.pcall
    ids[written] = id
  end
  return ids, at
end
