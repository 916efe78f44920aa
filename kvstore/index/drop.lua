-- Removes the names that are too long in one step through a set, which has just found them. Returns {garbage}.
--
-- KEYS  1 the set
-- ARGV  1 cursor  2 approximate number of names  3 maximum bytes of a name
if not is(KEYS[1], 'set') then return {garbage} end
for _, name in ipairs(redis.call('SSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])[2]) do
  if #name > tonumber(ARGV[3]) then redis.call('SREM', KEYS[1], name) end
end
return {garbage}
