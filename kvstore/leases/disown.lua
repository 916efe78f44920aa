-- Removes a worker's lease and highest epoch, which name an epoch that no worker has signed. Returns {garbage}.
--
-- KEYS  1 highest epoch  2 lease
-- ARGV  1 the caller's epoch
--
-- Race: the lease became the caller's, or lapsed, between its look and the removal.
local lease_epoch = is(KEYS[2], 'hash') and natural(redis.call('HGET', KEYS[2], 'epoch'), MAX_EPOCH, KEYS[2])
if not lease_epoch or lease_epoch > tonumber(ARGV[1]) then redis.call('UNLINK', KEYS[2]) end
redis.call('UNLINK', KEYS[1])
return {garbage}
