-- renewal_copy: a partition without room for ids -> the same, a part of it copied
--
-- Copy the next entries of a partition to a fresh stream, in their order. Ids are kept, but for
-- those that are too far ahead of the clock: they get new ones behind all others. Nobody reads the
-- copy before renewal_swap; the partition itself is not touched.
--
-- KEYS[1]  stream    STREAM  stream:topic:{T:p:i}
-- KEYS[2]  fresh     STREAM  stream:topic:{T:p:i}:renewal
-- KEYS[3]  renewal   HASH    streaming:mq:renewal:{T:p:i}
--
-- ARGV[1]  ahead_ms  int     ids that are so much ahead of the clock get new ones
-- ARGV[2]  count     int     copy at most this many
--
-- Returns  OK       [2] copied [3] 1 = there may be more
-- Returns  ROOM     the partition has room, nothing was begun    [2] last id
-- Returns  LARGE    an entry has more fields than a script can write    [2] its id
-- Returns  MISSING  there is no such stream
--
-- Cost     O(count x log n) + 512 KiB of bodies at most and one more
-- Repeat   safe: copies the next ones
-- @include _clock
-- @include _groups
-- @include _bytes
-- @include _ids
-- @include _after
-- @include _renewal

local stream, fresh, renewal = KEYS[1], KEYS[2], KEYS[3]
local ahead_ms, count = tonumber(ARGV[1]), tonumber(ARGV[2])

if redis.call('EXISTS', stream) == 0 then
  return {'MISSING'}
end
redis.call('XLEN', fresh)
local known = redis.call('HMGET', renewal, 'limit', 'after')
local limit, after = known[1], known[2] or '0-0'
local last = named(redis.call('XINFO', 'STREAM', stream))['last-generated-id']
if not limit then
  limit = text(now_unix_ms() + ahead_ms) .. '-' .. LAST_SEQ
  if not older(limit, last) then
    return {'ROOM', last}
  end
end
local page = entries_after(stream, after, '+', count)
for _, entry in ipairs(page) do
  if #entry[2] > FIELDS_MAX then
    return {'LARGE', entry[1]}
  end
end

-- Guards end here
redis.call('HSET', renewal, 'limit', limit)
local _, copied = copy_to(fresh, renewal, limit, page)
return {'OK', copied, (copied < #page or #page == count) and 1 or 0}
