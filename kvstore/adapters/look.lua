-- Reads the registry of adapters, unless its head is known. Returns {head, value, garbage}. The head is empty if there
-- is none, or says why the value cannot be read; the value is false then, and if the head is known.
--
-- KEYS  1 registry
-- ARGV  1 known head  2 maximum bytes  3 bytes of a head
local there = redis.call('TYPE', KEYS[1]).ok
if there == 'none' then return {'', false, garbage} end
if there ~= 'string' then return {'WRONGTYPE: a ' .. there .. ' in the place of a string', false, garbage} end
local length = redis.call('STRLEN', KEYS[1])
if length > tonumber(ARGV[2]) then return {'it has more than ' .. ARGV[2] .. ' bytes', false, garbage} end
local head = redis.call('GETRANGE', KEYS[1], 0, ARGV[3] - 1)
if head == ARGV[1] then return {head, false, garbage} end
return {head, redis.call('GET', KEYS[1]), garbage}
