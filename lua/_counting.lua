-- Count entries. The server copies their bodies for this, so a count stops after BYTES_MAX too.
-- Needs _byte_limit and _ranges.

-- Entries per read. A call can exceed the bound by this many bodies.
local PIECE = 4

-- Return the number of entries after an id and up to another, the id of the last one, and whether
-- there may be more because `limit` entries or BYTES_MAX bytes were read. Appends their ids to
-- `ids`, if given.
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
