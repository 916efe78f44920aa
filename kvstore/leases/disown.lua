-- Removes a worker's lease and highest epoch, which name an epoch that no worker has signed. Returns {garbage}.
--
-- KEYS  1 highest epoch  2 lease
-- ARGV  1 the caller's epoch
--
-- Race: the lease became the caller's, or lapsed, between its look and the removal.
local lease_epoch = number_at(KEYS[2], MAX_EPOCH, 'epoch')
if not lease_epoch or lease_epoch > tonumber(ARGV[1]) then redis.call('UNLINK', KEYS[2]) end
redis.call('UNLINK', KEYS[1])
return {garbage}
