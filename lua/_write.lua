-- Writing messages to a partition.

-- Write at most `room` of the messages in ARGV that start at index `at`. If `alone` is '1', each
-- message is only its payload. Otherwise, it is the number of its names and values, and then these.
-- Returns the IDs of the new entries, and the index of the first message that was not written.
--
-- If the server rejects an insertion, the function stops, and the error (a table) is the last item
-- of the IDs. If the server rejects the first insertion, the error is raised, because nothing was
-- written.
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
