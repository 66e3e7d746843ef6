-- query_position: one position -> another, of a Spark query on a partition
--
-- Publish how far a Spark query has read a partition. The script stores this as the position of a
-- consumer group. No client reads with this group, but every Redis tool can show its position and
-- lag. The group has one consumer, whose idle time is the time since the query last reported. Spark
-- itself continues from its own checkpoint, and never from this position.
--
-- KEYS[1]  stream  STREAM  stream:topic:{T:p:i}
-- KEYS[2]  trim    HASH    streaming:mq:trim:{T:p:i}
--
-- ARGV[1]  group   str     name of the group, which is spark:NAME
-- ARGV[2]  after   id      the last entry that the query has read. It has read all earlier ones too
-- ARGV[3]  read    int     number of entries read, counted from the first one ever added, or -1 if
--                          it is unknown
-- ARGV[4]  hold    flag    1 to keep entries that the query has not read, even beyond the limits of
--                          retention
--
-- Returns  OK       the position was recorded
--                   [2] the recorded position, which is never beyond the last ID of the stream
-- Returns  MISSING  the stream does not exist. The script does not create it, because its topic may
--                   just have been deleted
--
-- Cost     O(g), where g is the number of groups of the partition
-- Repeat   safe, but a late copy shows an earlier position until the next call. The script works
--          when memory is full
-- @include _groups
-- @include _ids

local stream, trim = KEYS[1], KEYS[2]
local group, after, read, hold = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local known = read_group(stream, group)
redis.call('HLEN', trim)
if redis.call('EXISTS', stream) == 0 then
  return {'MISSING'}
end
local info = to_table(redis.call('XINFO', 'STREAM', stream))
local last = info['last-generated-id']
-- With a position after the last ID, entries that are written later would not count as unread.
local position = {stream, group, older(last, after) and last or after}
-- Before Redis 7.0, the server does not count the entries that a group has read.
if position[3] == after and read >= 0 and info['entries-added'] then
  position[4], position[5] = 'ENTRIESREAD', math.min(read, info['entries-added'])
end

-- No writes above this line
-- HDEL is first because Redis accepts it when memory is full, and then accepts later writes too.
redis.call('HDEL', trim, 'holds:' .. group)
if not known then
  redis.call('XGROUP', 'CREATE', stream, group, '0')
end
redis.call('XGROUP', 'SETID', unpack(position))
-- Creating the consumer again resets its idle time.
redis.call('XGROUP', 'DELCONSUMER', stream, group, 'spark')
redis.call('XGROUP', 'CREATECONSUMER', stream, group, 'spark')
if hold == '1' then
  redis.call('HSET', trim, 'holds:' .. group, '1')
end
return {'OK', position[3]}
