-- Slices of lists.

-- The number of values in one command. `unpack` takes fewer than 8,000 values, so a long list is
-- passed in several commands.
local SLICE = 500

-- Return the values from `first` to `last` of a list as a new list.
local function slice(list, first, last)
  local part = {}
  for at = first, last do
    part[at - first + 1] = list[at]
  end
  return part
end
