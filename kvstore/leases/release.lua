-- Ends a lease. Returns 1, or 0 when it was not the caller's any more.
--
-- KEYS  1 lease  2 worker ids  3 seq  4 blocks  5 snapshot parts
-- ARGV  1 worker id  2 epoch
--
-- Race: a worker that shuts down slowly releases after its successor acquired, and would take the successor's lease.
redis.call('UNLINK', KEYS[3], KEYS[4], KEYS[5])
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
