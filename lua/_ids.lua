-- Arithmetic on entry IDs, `ms-seq`, as strings.
--
-- Both halves of an ID are 64-bit unsigned integers, but a Lua number is exact to only 53 bits. The
-- halves are therefore compared as decimal strings without leading zeros: first by their length,
-- and then by their characters.

local function split_id(id)
  local ms, seq = string.match(id, '^(%d+)%-(%d+)$')
  return ms or id, seq or '0'
end

local function is_less(a, b)
  if #a ~= #b then
    return #a < #b
  end
  return a < b
end

local function older(a, b)
  local a_ms, a_seq = split_id(a)
  local b_ms, b_seq = split_id(b)
  if a_ms ~= b_ms then
    return is_less(a_ms, b_ms)
  end
  return is_less(a_seq, b_seq)
end

local function earlier(a, b)
  return older(a, b) and a or b
end

-- Add one to a decimal string, or subtract one from it. This changes the last digit that does not
-- carry, and turns the digits after it into zeros (or nines).
local function plus_one(digits)
  local head, nines = string.match(digits, '^(%d-)(9*)$')
  if head == '' then
    head = '0'
  end
  local last = tonumber(string.sub(head, -1)) + 1
  return string.sub(head, 1, -2) .. last .. string.rep('0', #nines)
end

local function minus_one(digits)
  local head, zeros = string.match(digits, '^(%d-)(0*)$')
  local last = tonumber(string.sub(head, -1)) - 1
  local result = string.sub(head, 1, -2) .. last .. string.rep('9', #zeros)
  return string.match(result, '^0*(%d+)$')
end

local LAST_SEQ = '18446744073709551615'

local LAST_ID = LAST_SEQ .. '-' .. LAST_SEQ

-- Return true if a string is a complete ID within the 64-bit range. A stored record may contain any
-- string, because other clients can write it too.
local function is_id(raw)
  local ms, seq = string.match(raw or '', '^(%d+)%-(%d+)$')
  return ms ~= nil and not (is_less(LAST_SEQ, ms) or is_less(LAST_SEQ, seq))
end

-- Return the smallest ID after this one. No ID follows the greatest one, which is returned itself.
local function successor(id)
  local ms, seq = split_id(id)
  if id == LAST_ID then
    return id
  end
  if seq == LAST_SEQ then
    return plus_one(ms) .. '-0'
  end
  return ms .. '-' .. plus_one(seq)
end

-- Return the greatest ID before this one. No ID precedes 0-0, which is returned itself.
local function predecessor(id)
  local ms, seq = split_id(id)
  if seq ~= '0' then
    return ms .. '-' .. minus_one(seq)
  end
  if ms ~= '0' then
    return minus_one(ms) .. '-' .. LAST_SEQ
  end
  return '0-0'
end
