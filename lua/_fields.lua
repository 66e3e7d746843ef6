-- Field lists are flat: name, value, name, value … A body never leaves the server on its way to
-- the waiting retries, to the dead letters or back. The caller sends only the fields that change.

-- The most values that are carried, because `unpack` fails near 8,000. A wider entry was not
-- written by streamqd. It counts as an entry without a body, and the caller sends the fields that
-- it knows.
local WIDE = 4000

-- Return the body of an entry, or nil if the entry is trimmed, deleted or too wide to carry.
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

-- Return the body with some fields changed. Changed fields come last and the others keep their
-- order. Names in `dropped` (a set) are left out.
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
