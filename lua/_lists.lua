-- A slice of a list, as a list.

local function slice(list, first, last)
  local part = {}
  for at = first, last do
    part[at - first + 1] = list[at]
  end
  return part
end
