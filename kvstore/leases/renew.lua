-- Renews a lease and what hangs on it. Returns 0; or the highest epoch, which is newer and fences the caller off, or
-- is the caller's own when its lease has expired.
--
-- KEYS  1 highest epoch  2 lease  3 worker ids  4 seq  5 blocks  6 snapshot parts
-- ARGV  1 worker id  2 epoch  3 info  4 load  5 lease, ms  6 life of 4-6, ms  7 life of the highest epoch, ms
--
-- Race: a paused worker renews after its successor acquired. Compared apart from the write, it would take the lease
-- back. The highest epoch wins, also over a lease that has expired. After a loss of all state none is known: any live
-- worker gets its own epoch back, and a zombie that came first is fenced by its successor's next renewal.
local highest, own = tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[2])
local has_expired = highest == own and redis.call('EXISTS', KEYS[2]) == 0
if highest > own or has_expired then return string.format('%.0f', highest) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[7])
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'info', ARGV[3], 'load', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
redis.call('SADD', KEYS[3], ARGV[1])
for index = 4, 6 do redis.call('PEXPIRE', KEYS[index], ARGV[6]) end
return '0'
