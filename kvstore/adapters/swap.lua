-- Replaces the registry of adapters. Returns {1, garbage}, or {0, garbage} if another value is stored than was read.
--
-- KEYS  1 registry
-- ARGV  1 head as `look.lua` returned it  2 new value  3 bytes of a head  4 maximum bytes
--
-- Race: two routers add an adapter at a time, and the second would write a registry without the first one's.
local there, head = redis.call('TYPE', KEYS[1]).ok, ''
if there == 'string' then
  head = redis.call('GETRANGE', KEYS[1], 0, ARGV[3] - 1)
  if redis.call('STRLEN', KEYS[1]) > tonumber(ARGV[4]) then head = 'it has more than ' .. ARGV[4] .. ' bytes' end
elseif there ~= 'none' then
  head = 'WRONGTYPE: a ' .. there .. ' in the place of a string'
end
if head ~= ARGV[1] then return {0, garbage} end
if there ~= 'string' then redis.call('UNLINK', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[2])
return {1, garbage}
