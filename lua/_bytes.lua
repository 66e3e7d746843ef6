-- How much one call may copy: nobody else is served meanwhile. A script that copies bodies ends
-- once so many bytes of them have gone by, and says that there is more. One body may be larger.
-- streamqd/store/messages.py has the same number.
local BYTES_MAX = 524288

local function size_of(fields)
  local size = 0
  for _, part in ipairs(fields) do
    size = size + #part
  end
  return size
end

-- How many of the oldest entries may go at once, if all are like the first: freeing is quicker than
-- copying. A node holds 100 entries by the server's defaults; with fewer it might never go.
local FREED_MAX = 16777216
local NODE = 100

local function freed_at_once(stream, limit)
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local size = math.max(1, size_of(first and first[2] or {}))
  return math.min(limit, math.max(NODE, math.floor(FREED_MAX / size)))
end
