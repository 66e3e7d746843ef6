-- Remove the oldest entries of a stream in whole nodes. The server stores a stream as a tree of
-- nodes. By default, a node contains up to 100 entries or 4 KiB, or a single larger entry. Freeing
-- a node is faster than copying its entries but still takes time, so one call frees a limited
-- number of bytes.
local FREED_MAX = 16777216
local NODE = 100
local STEP = 128

-- An upper bound of the bytes that this call has freed, and true if FREED_MAX has kept the call
-- from freeing more.
local freed, stopped = 0, false

-- Return the number of oldest entries that may be freed, from 1 to `room`, and an upper bound of
-- their bytes. The bound assumes that each entry has its own node.
local function room_for(stream, nodes, room)
  local taken
  repeat
    local used = redis.pcall('MEMORY', 'USAGE', stream, 'SAMPLES', room)
    if type(used) ~= 'number' then
      return math.min(room, NODE), FREED_MAX  -- MEMORY is not permitted: free few entries
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

-- Remove whole nodes before an ID, with approximately `room` entries in total. A server may be
-- configured to use nodes of any size, and with a limit smaller than a node, nothing would ever be
-- removed. The first node is therefore removed even if it contains more entries, but at most
-- `most`. `info` is the reply of XINFO STREAM before the first call.
local function remove_nodes(stream, info, before, room, most)
  local nodes, removed, gone, piece, taken = info['radix-tree-keys'], 0, 0, 0, 0
  -- Try a few entries first, because usually there are no more, and examining nodes takes time too.
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
