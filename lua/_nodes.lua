-- Freeing the oldest entries, in whole nodes: quicker than copying them, but it takes its time too.
-- A node holds 100 entries or 4 KiB by the server's defaults, or one that is larger.
local FREED_MAX = 16777216
local NODE = 100
local STEP = 128

-- Of this call: the bytes that went, at most, and whether they have kept more from going.
local freed, stopped = 0, false

-- How many of the oldest entries may go, `room` at most, and what they take at most: as many of the
-- oldest nodes as there are entries. One goes in any case.
local function room_for(stream, nodes, room)
  local taken
  repeat
    local used = redis.pcall('MEMORY', 'USAGE', stream, 'SAMPLES', room)
    if type(used) ~= 'number' then
      return math.min(room, NODE), FREED_MAX  -- who may not ask is careful
    end
    taken = used * math.min(1, room / math.max(1, nodes))
    local left = FREED_MAX - freed
    local fits = taken <= left or room == 1
    if not fits then
      room = math.max(1, math.min(room - 1, math.floor(room * left / taken)))
    end
  until fits
  return room, taken
end

-- Remove whole nodes of what is before an id, of `room` entries or so; but the first node also if
-- it holds more, up to `most`. A server may be told to make nodes of any size: a bound smaller than
-- a node would remove nothing, forever. `info` is what XINFO STREAM told before the first call.
local function remove_nodes(stream, info, before, room, most)
  local nodes, removed, gone, piece, taken = info['radix-tree-keys'], 0, 0, 0, 0
  -- A few at first: mostly there are no more, and to look at nodes takes time as well.
  for _, upto in ipairs({math.min(room, STEP), room}) do
    if removed < upto and freed < FREED_MAX and 2 * gone >= piece then
      piece, taken = room_for(stream, nodes - removed, upto - removed)
      stopped = stopped or piece < upto - removed
      gone = redis.call('XTRIM', stream, 'MINID', '~', before, 'LIMIT', piece)
      removed, freed = removed + gone, gone > 0 and freed + taken or freed
    end
  end
  local first = info['first-entry']
  while removed == 0 and piece < most and first and older(first[1], before) do
    piece = math.min(2 * piece, most)
    removed = redis.call('XTRIM', stream, 'MINID', '~', before, 'LIMIT', piece)
  end
  stopped = stopped and removed > 0
  return removed
end
