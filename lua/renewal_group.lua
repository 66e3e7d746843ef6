-- renewal_group: a group on a partition -> the same, and on its fresh stream
--
-- Give a group the place on the fresh stream that it has on the partition: its position and what is
-- handed out, with consumer, idle time and deliveries. The partition is kept from owners meanwhile,
-- by a lease like any other, so nothing of it changes before renewal_swap.
--
-- KEYS[1]  fence     HASH    streaming:mq:fence:{T:p:i}:G
-- KEYS[2]  lease     STRING  streaming:mq:lease:{T:p:i}:G
-- KEYS[3]  attempts  HASH    streaming:mq:attempts:{T:p:i}:G
-- KEYS[4]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[5]  fresh     STREAM  stream:topic:{T:p:i}:renewal
-- KEYS[6]  renewal   HASH    streaming:mq:renewal:{T:p:i}
--
-- ARGV[1]  group     str     consumer group
-- ARGV[2]  force     flag    1 = also when it is owned
-- ARGV[3]  keeper    str     an owner that keeps it even then
-- ARGV[4]  token     token   of whoever renews, and keeps the partition from others
-- ARGV[5]  ttl_ms    int     for how long, from this call
-- ARGV[6]  at_once   int     more pending entries than this are too many
--
-- Returns  OK       [2] pending entries that went along [3] those without a body, which did not
-- Returns  MORE     entries are not copied yet: renewal_copy
-- Returns  OWNED    a lease lives                        [2] owner [3] epoch
-- Returns  MANY     too much is handed out               [2] how many
-- Returns  NOGROUP  the group does not exist on the partition
-- Returns  GONE     no renewal is under way
--
-- Cost     O(n), n = pending entries, at most `at_once`
-- Repeat   safe: gives it the place that it has then
-- @include _clock
-- @include _numbers
-- @include _groups
-- @include _bytes
-- @include _ids
-- @include _after
-- @include _lists
-- @include _places
-- @include _forgetting
-- @include _renewal

local fence, lease, attempts = KEYS[1], KEYS[2], KEYS[3]
local stream, fresh, renewal = KEYS[4], KEYS[5], KEYS[6]
local group, force, keeper, token = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local ttl_ms, at_once = ARGV[5], tonumber(ARGV[6])

local known = redis.call('HMGET', renewal, 'limit', 'after')
local limit = known[1]
if not limit then
  return {'GONE'}
end
local held = redis.call('HMGET', fence, 'owner', 'epoch', 'token')
local free = held[3] == token or not redis.call('GET', lease)
if not free and (force ~= '1' or held[1] == keeper) then
  return {'OWNED', held[1] or '', held[2] or '0'}
end
local on_stream = group_on(stream, group)
if not on_stream then
  return {'NOGROUP'}
end
if #entries_after(stream, known[2] or '0-0', '+', 1) > 0 then
  return {'MORE'}
end
if on_stream['pending'] > at_once then
  return {'MANY', on_stream['pending']}
end
redis.call('HLEN', attempts)
redis.call('XLEN', fresh)

-- Guards end here
keep(fence, lease, token, ttl_ms, 'topic-renew')
local position = on_stream['last-delivered-id']
local at = renewed_position(stream, fresh, renewal, limit, position)
if group_on(fresh, group) then
  redis.call('XGROUP', 'DESTROY', fresh, group)
end
redis.call('XGROUP', 'CREATE', fresh, group, at, 'MKSTREAM')
local moved, ghosts = 0, 0
for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', at_once)) do
  local id, idle = row[1], math.max(0, row[3])
  local new = renewed(renewal, limit, id)
  if redis.call('XRANGE', fresh, new, new)[1] then
    -- What no consumer has becomes ours.
    local name = row[2] == '' and 'w' or row[2]
    redis.call(
      'XCLAIM', fresh, group, name, 0, new, 'IDLE', text(idle), 'RETRYCOUNT', row[4], 'FORCE',
      'JUSTID'
    )
    moved = moved + 1
    for _, kind in ipairs(new ~= id and {':c', ':f', ':due', ':last'} or {}) do
      local kept = redis.call('HGET', attempts, 'm:' .. id .. kind)
      if kept then
        redis.call('HSET', attempts, 'm:' .. new .. kind, kept)
      end
    end
  else
    ghosts = ghosts + 1
  end
end
-- The lease of this call lives until then; the clock that judges it is the same.
local stand = {text(now_unix_ms() + ttl_ms), position, text(on_stream['pending']), at}
redis.call('HSET', renewal, 'group:' .. group, table.concat(stand, ' '))
return {'OK', moved, ghosts}
