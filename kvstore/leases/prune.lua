-- Takes an id out of the set of ids whose lease is gone.
--
-- KEYS  1 lease  2 ids
-- ARGV  1 id
--
-- Race: the id's owner comes back between our look and the removal, and nobody would list it until it renews again.
if redis.call('EXISTS', KEYS[1]) == 0 and is(KEYS[2], 'set') then redis.call('SREM', KEYS[2], ARGV[1]) end
return {garbage}
