-- Parse the entries of a call that settles several. Needs _lists. The arguments are
--
--     shared_count (name value)*    { place [delay_ms] own_count (name value)* }*
--
-- The counts are numbers of names and values. The shared fields change in all entries. If an item
-- has its own value for a shared name, this value replaces the shared one. Its other fields come
-- last.

-- Return the items and their shared fields: a list, and the index of each name's value in it.
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
    -- One constructor for all fields: a table that grows field by field is reallocated four times.
    items[#items + 1] = {
      place = place, delay_ms = delay_ms, own = own, source = false, id = false, word = false,
      body = false,
    }
    at = last + 1
  end
  return items, shared
end

-- Return the shared names and values in a list of their own, after `count` empty slots.
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

-- Return the fields of an item at its next place. Changed fields come last and the others keep
-- their order. Names in `dropped` (a set) are left out of the body.
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
