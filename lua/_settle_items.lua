-- Parse the arguments of a call that settles several entries. Needs _lists. The arguments are
--
--     shared_count (name value)*    { place [delay_ms] own_count (name value)* }*
--
-- Each count is the number of names and values that follow. The shared fields change in all
-- entries. If an item has its own value for the name of a shared field, the item's value is used.
-- Its other fields come after the shared ones.

-- Return the items and their shared fields. `list` contains the shared names and values, and `at`
-- the index of each value in that list.
local function read_items(first, delayed)
  local last = first + tonumber(ARGV[first] or 0)
  local shared = {list = slice(ARGV, first + 1, last), at = {}, lists = {}}
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
    -- One constructor sets all fields, because a table that grows is reallocated four times.
    items[#items + 1] = {
      place = place, delay_ms = delay_ms, own = own, source = false, id = false, word = false,
      body = false,
    }
    at = last + 1
  end
  return items, shared
end

-- Return a new list that contains `count` empty slots and then the shared names and values.
local function shared_after(shared, count)
  local list = shared.lists[count]
  if not list then
    list = {}
    for at = 1, count + #shared.list do
      list[at] = at > count and shared.list[at - count] or ''
    end
    shared.lists[count] = list
  end
  return {unpack(list)}
end

-- Return the fields that an item has at its next place. The changed fields come last, and the
-- others keep their order. Fields of the body whose names are in `dropped` (a set) are left out.
local function change_fields(item, shared, dropped)
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
  local result = shared_after(shared, count)
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
