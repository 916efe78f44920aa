-- Removes a worker's lease and highest epoch if they name an epoch that no worker has signed. Returns {garbage}.
--
-- KEYS  1 highest epoch  2 lease
-- ARGV  1 the caller's epoch
--
-- Race: between the caller's read and the removal, the lease became the caller's or expired.
local lease_epoch = number_at(KEYS[2], MAX_EPOCH, 'epoch')
if not lease_epoch or lease_epoch > tonumber(ARGV[1]) then redis.call('UNLINK', KEYS[2]) end
redis.call('UNLINK', KEYS[1])
return {garbage}
