-- Changes the mark of a request's usage, unless another router has changed it. Returns {1 or 0, garbage}.
--
-- KEYS  1 the mark  2 the marks that hold a record
-- ARGV  1 the mark as it was read; '': there was none  2 the new mark  3 its lifetime, ms
--       4 member of the mark among those that hold a record  5 when that record is due, ms; '': it holds none
--       6 maximum bytes of a mark
--
-- Race: a record becomes due while its client returns to another router. One of the two routers finds the mark changed,
-- and decides again.
local is_mark = not make_room(KEYS[1], 'string') and redis.call('STRLEN', KEYS[1]) <= tonumber(ARGV[6])
local found = is_mark and redis.call('GET', KEYS[1]) or '' -- a mark that is too large counts as none, as for its reader
if found ~= ARGV[1] then return {0, garbage} end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
make_room(KEYS[2], 'zset')
if ARGV[5] ~= '' then
  redis.call('ZADD', KEYS[2], ARGV[5], ARGV[4])
else
  redis.call('ZREM', KEYS[2], ARGV[4])
end
return {1, garbage}
