-- Rows of an outbox: 32 hex digits of the uid and 16 of the id. Needs _clock, _fields, _lists.

local function uid_of(row)
  return string.sub(row, 1, 32)
end

-- Return the uids of a record as a set.
local function recorded_in(rows)
  local uids = {}
  for row in string.gmatch(rows or '', string.rep('%x', 48)) do
    uids[uid_of(row)] = true
  end
  return uids
end

-- Write one row by `call`. Its values are in ARGV from `first` to `last`. It is delayed if `due` is
-- after `now`. Return an error or another value.
local function write_row(call, keys, uid, due, now, first, last)
  if due == '' or tonumber(due) <= now then
    return call('XADD', keys.stream, '*', unpack(ARGV, first, last))
  end
  local fields = merged(slice(ARGV, first, last), {'sentAt', text(now)}, {})
  local failure = call('HSET', keys.items, uid, cmsgpack.pack(fields))
  if type(failure) == 'table' and failure.err then
    return failure
  end
  return call('ZADD', keys.scheduled, due, uid)
end
