-- group_restore: absent -> present, for a group whose owner knows its position and pending entries
--
-- Create a group again that another client destroyed while its owner was running. The owner still
-- knows the last entry delivered to the group and the entries that are not settled. The script
-- creates the group after the last delivered entry, and makes the unsettled entries pending again
-- in the same step. As a result, the group neither skips a message nor handles an acknowledged one
-- again. If the stream itself was deleted too, the group starts at the first entry of the new
-- stream.
--
-- KEYS[1]  fence        HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  stream       STREAM  stream:topic:{T:p:i}
-- KEYS[3]  retry        STREAM  stream:topic:{T:p:i}:retry:G
--
-- ARGV[1]  token        token   token of the owner
-- ARGV[2]  group        str     consumer group
-- ARGV[3]  after_main   id      ID of the last entry delivered from the partition stream
-- ARGV[4]  after_retry  id      ID of the last entry delivered from the retry stream
-- ARGV[5..] places      list    places of the delivered entries that are not settled
--
-- Returns  OK      the group exists
--                  [2] ID after which it continues in the partition stream, or '' if the group
--                  still existed there
--                  [3] the same ID for the retry stream
-- Returns  FENCED  the caller does not own the assignment, which has another owner or none
--                  [2] epoch that the fence contains
--                  [3] owner that the fence names, or '' if there is none
--
-- Cost     O(g + e x log n), where g is the number of groups, e the number of entries in `places`,
--          and n the number of pending entries
-- Repeat   idempotent: the second call returns OK with ''
-- @include _fence
-- @include _groups
-- @include _ids
-- @include _lists
-- @include _places

local fence, stream, retry = KEYS[1], KEYS[2], KEYS[3]
local token, group, after_main, after_retry = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local places = slice(ARGV, 5, #ARGV)

local refusal = superseded(fence, token)
if refusal then
  return refusal
end
local main_ids, retry_ids, bad = sort_places(stream, retry, places)
if bad then
  return redis.error_reply('ERR not a place: ' .. bad)
end

-- Return the ID after which the group continues on a stream, or nil if it exists there.
local function restore_position(source, after)
  if read_group(source, group) then
    return nil
  end
  local exists = redis.call('EXISTS', source) == 1
  local info = exists and to_table(redis.call('XINFO', 'STREAM', source))
  local last = info and info['last-generated-id'] or '0-0'
  return older(last, after) and '0-0' or after
end
local main_at, retry_at = restore_position(stream, after_main), restore_position(retry, after_retry)

-- No writes above this line
local function create_group(source, at, ids)
  redis.call('XGROUP', 'CREATE', source, group, at, 'MKSTREAM')
  for first = 1, #ids, SLICE do
    local part = slice(ids, first, math.min(first + SLICE - 1, #ids))
    part[#part + 1], part[#part + 2] = 'FORCE', 'JUSTID'
    redis.call('XCLAIM', source, group, 'w', 0, unpack(part))
  end
end
if retry_at then
  create_group(retry, retry_at, retry_ids)
end
if main_at then
  create_group(stream, main_at, main_ids)
end
return {'OK', main_at or '', retry_at or ''}
