-- Many entries in one call to settle. First comes what changes alike in all of them: field_count,
-- then that many names and values. An item is: place, [delay_ms,] field_count, that many names and
-- values of its own. Of a name that all have, its own value stands in the place of the shared one;
-- the others come last. Needs _lists.

-- Answers the items, and what they share: a list, and where in it the value of a name is.
local function read_items(first, delayed)
  local last = first + tonumber(ARGV[first] or 0)
  local shared = {list = slice(ARGV, first + 1, last), at = {}, behind = {}}
  for at = 1, #shared.list, 2 do
    shared.at[shared.list[at]] = at + 1
  end
  local items = {}
  local at = last + 1
  while at <= #ARGV do
    local place, delay_ms = ARGV[at], delayed and tonumber(ARGV[at + 1])
    at = delayed and at + 2 or at + 1
    last = at + tonumber(ARGV[at])
    local own = {unpack(ARGV, at + 1, last)}
    -- All at once: a table that grows field by field is made again four times.
    items[#items + 1] = {
      place = place, delay_ms = delay_ms, own = own, source = false, id = false, word = false,
      body = false,
    }
    at = last + 1
  end
  return items, shared
end

-- The shared names and values in a list of their own, behind so many places.
local function behind(shared, count)
  local list = shared.behind[count]
  if not list then
    list = {}
    for at = 1, count + #shared.list do
      list[at] = at > count and shared.list[at - count] or ''
    end
    shared.behind[count] = list
  end
  return {unpack(list)}
end

-- The fields of an item at its next place: the changed ones come last, the others keep their order.
-- Names in `dropped` (a set) are left out of the body.
local function renewed(item, shared, dropped)
  local own, others = item.own, {}
  for at = 1, #own, 2 do
    if not shared.at[own[at]] then
      others[own[at]] = true
    end
  end
  local kept, body = {}, item.body
  for at = 1, #body, 2 do
    local name = body[at]
    if not (shared.at[name] or others[name] or dropped[name]) then
      kept[#kept + 1] = name
      kept[#kept + 1] = body[at + 1]
    end
  end
  local count = #kept
  local result = behind(shared, count)
  for at = 1, count do
    result[at] = kept[at]
  end
  for at = 1, #own, 2 do
    local value_at = shared.at[own[at]]
    if value_at then
      result[count + value_at] = own[at + 1]
    else
      result[#result + 1] = own[at]
      result[#result + 1] = own[at + 1]
    end
  end
  return result
end
