-- Removes the ids without a value from a set of ids. Returns {the others, garbage}.
--
-- KEYS  1 ids, then the value of each id
-- ARGV  the ids
--
-- Race: an id's owner comes back between the caller's read and the removal, and no client would list it until
-- it renews.
local living, gone = {}, {}
for at, id in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[at + 1]) == 1 then living[#living + 1] = id else gone[#gone + 1] = id end
end
if #gone > 0 and is(KEYS[1], 'set') then redis.call('SREM', KEYS[1], unpack(gone)) end
return {living, garbage}
