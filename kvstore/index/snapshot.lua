-- Returns {a worker's seal, its entries, garbage}.
--
-- KEYS  1 seal  2 blocks
--
-- Race: the worker publishes between the two, and the seal would be that of another set.
local seal = is(KEYS[1], 'string') and redis.call('GET', KEYS[1]) or ''
return {seal, is(KEYS[2], 'set') and redis.call('SMEMBERS', KEYS[2]) or {}, garbage}
