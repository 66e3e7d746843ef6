-- Rows of an outbox, each named by 32 hex digits of its uid and 16 of its ID. Needs _clock,
-- _fields, _lists.

local function row_uid(row)
  return string.sub(row, 1, 32)
end

-- Return the set of the uids in a record.
local function parse_uids(rows)
  local uids = {}
  for row in string.gmatch(rows or '', string.rep('%x', 48)) do
    uids[row_uid(row)] = true
  end
  return uids
end

-- Write one row with `call`, which is redis.call or redis.pcall. The values of the row are in ARGV
-- from `first` to `last`. If `due` is after `now`, the row becomes a delayed send. Returns an
-- error, or another value if the row was written.
local function write_row(call, keys, uid, due, now, first, last)
  if due == '' or tonumber(due) <= now then
    return call('XADD', keys.stream, '*', unpack(ARGV, first, last))
  end
  local fields = merge_fields(slice(ARGV, first, last), {'sentAt', text(now)}, {})
  local failure = call('HSET', keys.items, uid, cmsgpack.pack(fields))
  if type(failure) == 'table' and failure.err then
    return failure
  end
  return call('ZADD', keys.scheduled, due, uid)
end
