-- One step through a set, or through the names of a hash. Returns {cursor, names, number of names that are too long,
-- garbage}; for a hash, the length of its value follows each name. Names that are too long are never sent.
--
-- KEYS  1 the set or hash
-- ARGV  1 'set' or 'hash'  2 cursor  3 approximate number of names  4 maximum bytes of a name
--
-- A step through a small set or hash returns all of it, however few names were asked for; Redis limits what counts
-- as small.
local kind, most = ARGV[1], tonumber(ARGV[4])
local there = redis.call('TYPE', KEYS[1]).ok
if there ~= kind and there ~= 'none' then return {'WRONGTYPE: a ' .. there .. ' in the place of a ' .. kind, {}, 0, garbage} end

local step = redis.call(kind == 'set' and 'SSCAN' or 'HSCAN', KEYS[1], ARGV[2], 'COUNT', ARGV[3])
local names, num_long = {}, 0
for at = 1, #step[2], kind == 'set' and 1 or 2 do
  local name = step[2][at]
  if #name > most then
    num_long = num_long + 1
  else
    names[#names + 1] = name
    if kind == 'hash' then names[#names + 1] = #step[2][at + 1] end
  end
end
return {step[1], names, num_long, garbage}
