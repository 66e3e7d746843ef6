-- How many of the oldest entries may go at once, if all are like the first: freeing is quicker than
-- copying. A node holds 100 entries by the server's defaults, and goes as a whole.
local FREED_MAX = 16777216
local NODE = 100

-- That many, `limit` at most, and the id of the first one, nil when there is none.
local function freed_at_once(stream, limit)
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local size = math.max(1, size_of(first and first[2] or {}))
  return math.min(limit, math.max(NODE, math.floor(FREED_MAX / size))), first and first[1]
end

-- Remove whole nodes of what is before an id, of `room` entries or so; but the node of the first
-- one also if it holds more, up to `most`. A server may be told to make nodes of any size: a bound
-- that is smaller than a node would remove nothing, for ever.
local function remove_nodes(stream, first, before, room, most)
  local removed = redis.call('XTRIM', stream, 'MINID', '~', before, 'LIMIT', room)
  while removed == 0 and room < most and older(first, before) do
    room = math.min(2 * room, most)
    removed = redis.call('XTRIM', stream, 'MINID', '~', before, 'LIMIT', room)
  end
  return removed
end
