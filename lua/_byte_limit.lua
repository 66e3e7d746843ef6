-- The number of bytes that one call may copy. It is limited because the server serves no other
-- client while a script runs. A script that copies bodies stops after this many bytes, and reports
-- that there is more. A single body may still be larger. streamqd/store/items.py contains the same
-- number.
local BYTES_MAX = 524288

local function fields_size(fields)
  local size = 0
  for at = 1, #fields do
    size = size + #fields[at]
  end
  return size
end
