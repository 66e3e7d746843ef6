-- dead_letters_measure: read-only
--
-- Count the dead letters of a partition by group. Each call counts one page. The script examines
-- the dead letters inside the server, so no body is transferred to the client.
--
-- KEYS[1]  dlq    STREAM  stream:topic:{T:p:i}:dlq
--
-- ARGV[1]  after  id      last dead letter of the previous page, or '' to start at the beginning
-- ARGV[2]  count  int     maximum number of dead letters to count
--
-- Returns  OK  the page was counted
--              [2] names of the groups and their counts, alternating
--              [3] last dead letter of the page, or `after` if there was none
--              [4] 1 if there may be more dead letters
--              [5] number of dead letters in the stream
--
-- Cost     O(log n + count), where n is the number of dead letters. The script reads at most 512
--          KiB of bodies plus eight more
-- Repeat   safe, because the script only reads
-- @include _byte_limit
-- @include _groups
-- @include _ids

local dlq, after, count = KEYS[1], ARGV[1], tonumber(ARGV[2])

-- Number of dead letters per read. It is small, so few bodies are copied beyond the byte limit.
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
    local group = to_table(letter[2])['group'] or ''
    if not counts[group] then
      order[#order + 1] = group
      counts[group] = 0
    end
    counts[group] = counts[group] + 1
    bytes = bytes + fields_size(letter[2])
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
