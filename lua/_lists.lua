-- Parts of lists.

-- `unpack` takes fewer than 8,000 values, so long lists are passed in slices.
local SLICE = 500

-- Return a slice of a list, as a list.
local function slice(list, first, last)
  local part = {}
  for at = first, last do
    part[at - first + 1] = list[at]
  end
  return part
end
