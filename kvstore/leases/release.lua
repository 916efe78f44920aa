-- Ends a lease. Returns {1, garbage}, or {0, garbage} if the caller no longer held it.
--
-- KEYS  1 lease  2 worker ids  3 seq  4 blocks  5 snapshot parts  6 seal
-- ARGV  1 worker id  2 epoch
--
-- Race: a worker that shuts down slowly releases after its successor has acquired, and would remove the
-- successor's lease.
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5], KEYS[6])
if number_at(KEYS[1], MAX_EPOCH, 'epoch') ~= tonumber(ARGV[2]) then return {0, garbage} end
redis.call('UNLINK', KEYS[1])
if is(KEYS[2], 'set') then redis.call('SREM', KEYS[2], ARGV[1]) end
return {1, garbage}
