-- The fields of entries, as flat lists: name, value, name, value … When a message moves to the
-- waiting retries, to the dead letters or back, its body stays inside the server, and the caller
-- sends only the fields that change.

-- The maximum number of names and values that a script copies, because `unpack` fails near 8,000.
-- An entry with more was not written by streamqd. It is treated as an entry without a body, so the
-- caller sends the fields that it knows.
local WIDE = 4000

-- Return the body of an entry, or nil if the entry is trimmed, deleted or has too many fields.
local function read_body(source, id)
  local found = redis.call('XRANGE', source, id, id)
  if #found == 0 or #found[1][2] > WIDE then
    return nil
  end
  return found[1][2]
end

local function has_field(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then
      return true
    end
  end
  return false
end

-- Return the body with some fields changed. The changed fields come last, and the others keep their
-- order. Fields whose names are in `dropped` (a set) are left out.
local function merge_fields(body, changed, dropped)
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
