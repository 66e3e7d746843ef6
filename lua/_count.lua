-- Counting entries, for which their bodies are copied too. Needs _bytes
-- and _after.

-- Entries that are read at once: what they may take beyond the bound is as many bodies.
local PIECE = 4

-- How many entries come after an id and not beyond another; the id of the last of them; whether
-- there may be more, because `limit` entries or the bytes that one call may copy have gone by.
-- A list gets their ids.
local function count_after(source, after, upto, limit, ids)
  local count, size, piece = 0, 0, 1
  while count < limit and size < BYTES_MAX do
    local wanted = math.min(piece, limit - count)
    local page = entries_after(source, after, upto, wanted)
    for _, entry in ipairs(page) do
      size = size + size_of(entry[2])
      after = entry[1]
      if ids then
        ids[#ids + 1] = after
      end
    end
    count = count + #page
    if #page < wanted then
      return count, after, false
    end
    piece = math.min(2 * piece, PIECE)
  end
  return count, after, true
end
