-- query_position: one position -> another, of a Spark query on a partition
--
-- Show how far a Spark query has read a partition, as the position of a group that nobody reads
-- with: so every tool for Redis shows it, with its lag. Its one consumer was last seen when the query
-- last told its position. What Spark does next stands in its own checkpoint; nothing of that depends
-- on this.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  trim    HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  group   str     spark:NAME
-- ARGV[2]  after   id      the last entry that is read, with all before it
-- ARGV[3]  read    int     how many entries that were, of all ever added; -1 = not known
-- ARGV[4]  hold    flag    1 = what it has not read stays, whatever retention says
--
-- Returns  OK      [2] the position noted: no further than the last entry
-- Returns  ABSENT  there is no stream, and none is made: its topic may just have been deleted
--
-- Cost     O(g), g = groups of the partition
-- Repeat   safe; a late copy shows an earlier position until the next one. Works when memory is full
-- @include _groups
-- @include _ids

local stream, trim = KEYS[1], KEYS[2]
local group, after, read, hold = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local known = group_on(stream, group)
redis.call('HLEN', trim)
if redis.call('EXISTS', stream) == 0 then
  return {'ABSENT'}
end
local info = named(redis.call('XINFO', 'STREAM', stream))
local last = info['last-generated-id']
-- A position beyond the last id would hide what is still to come.
local position = {stream, group, older(last, after) and last or after}
-- Before 7.0 the server does not count what a group has read.
if position[3] == after and read >= 0 and info['entries-added'] then
  position[4], position[5] = 'ENTRIESREAD', math.min(read, info['entries-added'])
end

-- Guards end here
-- HDEL first: accepted when memory is full, and so is every write behind it.
redis.call('HDEL', trim, 'holds:' .. group)
if not known then
  redis.call('XGROUP', 'CREATE', stream, group, '0')
end
redis.call('XGROUP', 'SETID', unpack(position))
-- A consumer that is made again is one that was seen just now.
redis.call('XGROUP', 'DELCONSUMER', stream, group, 'spark')
redis.call('XGROUP', 'CREATECONSUMER', stream, group, 'spark')
if hold == '1' then
  redis.call('HSET', trim, 'holds:' .. group, '1')
end
return {'OK', position[3]}
