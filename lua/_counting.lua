-- Count entries. To return an entry, the server copies its body, so a count also stops after
-- BYTES_MAX bytes. Needs _byte_limit and _ranges.

-- Number of entries per read. A call can exceed the byte limit by this many bodies.
local PIECE = 4

-- Count the entries after one ID and up to another. Returns the count, the ID of the last entry,
-- and true if there may be more, because the count stopped at `limit` entries or at BYTES_MAX
-- bytes. Appends the IDs of the entries to `ids`, if given.
local function count_after(source, after, upto, limit, ids)
  local count, size, piece = 0, 0, 1
  while count < limit and size < BYTES_MAX do
    local wanted = math.min(piece, limit - count)
    local page = entries_after(source, after, upto, wanted)
    for _, entry in ipairs(page) do
      size = size + fields_size(entry[2])
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
