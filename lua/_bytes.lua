-- How much one call may copy: no other client is served meanwhile. A script that copies bodies ends
-- once so many bytes of them have gone by, and says that there is more. One body may be larger.
-- streamqd/store/items.py has the same number.
local BYTES_MAX = 524288

local function size_of(fields)
  local size = 0
  for _, part in ipairs(fields) do
    size = size + #part
  end
  return size
end
