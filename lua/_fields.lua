-- Field lists, flat: name, value, name, value … A body never leaves the server on its way to the
-- delayed set, the dead letters or back; only the fields that change come from the caller.

-- More values than this are not carried: `unpack` ends near 8,000. Such an entry was written by
-- hand; it counts as one without a body, and the caller sends the fields that it knows.
local WIDE = 4000

-- The body of an entry, or nothing when it is trimmed, deleted or too wide to carry.
local function body_of(source, id)
  local found = redis.call('XRANGE', source, id, id)
  if #found == 0 or #found[1][2] > WIDE then
    return nil
  end
  return found[1][2]
end

local function has(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then
      return true
    end
  end
  return false
end

-- The body with fields changed: the changed ones come last, the others keep their order. Names in
-- `dropped` (a set) are left out.
local function merged(body, changed, dropped)
  local skip = {}
  for at = 1, #changed, 2 do
    skip[changed[at]] = true
  end
  local result = {}
  for at = 1, #body, 2 do
    if not skip[body[at]] and not dropped[body[at]] then
      result[#result + 1] = body[at]
      result[#result + 1] = body[at + 1]
    end
  end
  for at = 1, #changed do
    result[#result + 1] = changed[at]
  end
  return result
end
