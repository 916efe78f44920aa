-- Renews a lease and the keys that expire with it. Returns {0, garbage}; or {the epoch that holds the id, garbage}: a
-- newer epoch that fences the caller off, or the caller's own if its lease has expired.
--
-- KEYS  1 highest epoch  2 lease  3 worker ids  4 boot token  5 seq  6 blocks  7 snapshot parts  8 seal
-- ARGV  1 worker id  2 epoch  3 info  4 load  5 lease, ms  6 lifetime of 5-8, ms  7 lifetime of the highest epoch, ms
--       8 stamp; '': nothing is signed  9 signature  10 time of the chain's start  11 signature of it  12 renewal
--
-- Race: a paused worker renews after its successor has acquired. If the comparison and the write were two steps,
-- it would take the lease back. The highest epoch wins, also over an expired lease. After a loss of all state no
-- epoch is known: any live worker gets its own epoch back, and a zombie that came first is fenced by its
-- successor's next renewal.
for index = 5, 8 do redis.call('PEXPIRE', KEYS[index], ARGV[6]) end -- first, so that a full Redis takes the others
local holder, own = epochs(KEYS[2], KEYS[1]), tonumber(ARGV[2])
local has_expired = holder == own and redis.call('EXISTS', KEYS[2]) == 0
if holder > own or has_expired then return {string.format('%.0f', holder), garbage} end
make_room(KEYS[2], 'hash')
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[7])
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'info', ARGV[3], 'load', ARGV[4])
if ARGV[8] ~= '' then
  redis.call('HSET', KEYS[2], 'stamp', ARGV[8], 'signature', ARGV[9])
  redis.call('HSET', KEYS[2], 'since', ARGV[10], 'anchored', ARGV[11], 'renewal', ARGV[12])
end
redis.call('PEXPIRE', KEYS[2], ARGV[5])
enlist(ARGV[1], KEYS[3], KEYS[4])
return {'0', garbage}
