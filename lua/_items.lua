-- Many entries in one call to settle. An item is: place, [delay_ms,] field_count, then so many
-- names and values. Needs _lists, _places and _fields.

local function read_items(first, delayed)
  local items = {}
  local at = first
  while at <= #ARGV do
    local item = {place = ARGV[at]}
    at = at + 1
    if delayed then
      item.delay_ms = tonumber(ARGV[at])
      at = at + 1
    end
    local last = at + tonumber(ARGV[at])
    item.changed = slice(ARGV, at + 1, last)
    items[#items + 1] = item
    at = last + 1
  end
  return items
end

-- Says for each item what will become of it: sets `word`, and for MOVED also `source`, `id` and
-- `body`. Only reads. Answers the first text that is not a place, if there is one.
local function judge_items(items, stream, retry, group)
  local seen = {}
  for _, item in ipairs(items) do
    local source, id = locate(stream, retry, item.place)
    if not source then
      return item.place
    end
    if seen[item.place] or not pending(source, group, id) then
      item.word = 'GONE'
    else
      seen[item.place] = true
      local body = body_of(source, id)
      if not body and has(item.changed, 'payload') then
        body = {}
      end
      item.word = body and 'MOVED' or 'GHOST'
      item.source, item.id, item.body = source, id, body
    end
  end
  return nil
end
