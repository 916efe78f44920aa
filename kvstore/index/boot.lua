-- The token of the store's present life, drawn if there is none. Returns {the token, garbage}.
--
-- KEYS  1 boot token
-- ARGV  1 a new token
--
-- Race: two clients that find no token, or the same garbage, must both get the same token.
local MOST = 64 -- bytes of a token
local is_short = is(KEYS[1], 'string') and redis.call('STRLEN', KEYS[1]) <= MOST
local found = is_short and redis.call('GET', KEYS[1])
if found and string.match(found, '^[%w-]+$') then return {found, garbage} end
if found or not is_short then report(KEYS[1]) end
redis.call('UNLINK', KEYS[1]) -- first, so that a full Redis takes the token
redis.call('SET', KEYS[1], ARGV[1])
return {ARGV[1], garbage}
