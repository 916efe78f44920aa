-- A worker's set and its seal. Returns {the seal, number of entries, entries, garbage}: the entries of each length,
-- concatenated; no entries if the set has more than the caller accepts.
--
-- KEYS  1 seal  2 blocks
-- ARGV  1 maximum number of entries; 0: none  2 bytes of a seal, then each length in bytes that an entry may have
--
-- Race: the worker publishes between two separate reads, and the seal would belong to another set.
local has_seal = is(KEYS[1], 'string') and redis.call('STRLEN', KEYS[1]) == tonumber(ARGV[2])
local seal = has_seal and redis.call('GET', KEYS[1]) or ''
if not is(KEYS[2], 'set') then return {seal, 0, {}, garbage} end
local size = redis.call('SCARD', KEYS[2])
if size > tonumber(ARGV[1]) then return {seal, size, {}, garbage} end

local by_length, packed = {}, {}
for at = 3, #ARGV do by_length[tonumber(ARGV[at])] = {} end
for _, entry in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  local found = by_length[#entry]
  if found then found[#found + 1] = entry end -- others make the set differ from the signed one
end
for at = 3, #ARGV do packed[#packed + 1] = table.concat(by_length[tonumber(ARGV[at])]) end
return {seal, size, packed, garbage}
