-- Reads values within bounds: a value above its size limit is neither copied nor sent. Returns {{a result for each
-- key}, garbage}: false if there is no such key, a list of its values, or a text that says why it cannot be read.
--
-- KEYS  strings, or hashes
-- ARGV  for strings: 1 the maximum bytes; for hashes, for each wanted field: its name, its maximum bytes
local kind = #ARGV == 1 and 'string' or 'hash'

local function beyond(length, most) return length .. ' bytes, and may have ' .. most end

local function string_at(key)
  local length = redis.call('STRLEN', key)
  if length > tonumber(ARGV[1]) then return 'it has ' .. beyond(length, ARGV[1]) end
  return {redis.call('GET', key)}
end

local function hash_at(key)
  local names = {}
  for at = 1, #ARGV, 2 do
    local length = redis.call('HSTRLEN', key, ARGV[at])
    if length > tonumber(ARGV[at + 1]) then return 'a field of it has ' .. beyond(length, ARGV[at + 1]) end
    names[#names + 1] = ARGV[at]
  end
  return redis.call('HMGET', key, unpack(names))
end

local found = {}
for at, key in ipairs(KEYS) do
  local there = redis.call('TYPE', key).ok
  if there == 'none' then found[at] = false
  elseif there ~= kind then found[at] = 'WRONGTYPE: a ' .. there .. ' in the place of a ' .. kind
  else found[at] = kind == 'string' and string_at(key) or kind == 'hash' and hash_at(key) end
end
return {found, garbage}
