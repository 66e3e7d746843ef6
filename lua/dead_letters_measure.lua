-- dead_letters_measure: read-only
--
-- Count the dead letters of a partition by group, one page per call. Entries are examined here, so
-- that no body is transferred.
--
-- KEYS[1]  dlq    STREAM  stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  after  id   last dead letter of the previous page, '' = start
-- ARGV[2]  count  int  at most this many dead letters
--
-- Returns  OK  [2] group names and their counts, alternating [3] last dead letter of the page, or
--              `after` [4] 1 = there may be more [5] total number of dead letters
--
-- Cost     O(log n + count) + at most 512 KiB of bodies plus eight more, n = dead letters
-- Repeat   safe: read-only
-- @include _byte_limit
-- @include _groups
-- @include _ids

local dlq, after, count = KEYS[1], ARGV[1], tonumber(ARGV[2])

-- Letters per read: a large one copies few others beyond the limit.
local AT_ONCE = 8

local order, counts = {}, {}
local seen, bytes, more = 0, 0, true
while more and seen < count and bytes < BYTES_MAX do
  local page = {}
  if after ~= LAST_SEQ .. '-' .. LAST_SEQ then
    local first = after == '' and '-' or successor(after)
    page = redis.call('XRANGE', dlq, first, '+', 'COUNT', math.min(AT_ONCE, count - seen))
  end
  more = #page > 0
  for _, letter in ipairs(page) do
    local group = named(letter[2])['group'] or ''
    if not counts[group] then
      order[#order + 1] = group
      counts[group] = 0
    end
    counts[group] = counts[group] + 1
    bytes = bytes + size_of(letter[2])
    after = letter[1]
  end
  seen = seen + #page
end
local rows = {}
for _, group in ipairs(order) do
  rows[#rows + 1] = group
  rows[#rows + 1] = counts[group]
end
return {'OK', rows, after, more and 1 or 0, redis.call('XLEN', dlq)}
