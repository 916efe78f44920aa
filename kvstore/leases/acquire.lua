-- Gives a worker id to a new incarnation. Returns {its epoch, 1, garbage}, or {the epoch that fences the caller off,
-- 0, garbage}.
--
-- KEYS  1 highest epoch  2 lease  3 worker ids  4 boot token
-- ARGV  1 worker id  2 lower bound of the new epoch: now, ms  3 lease, ms  4 lifetime of the highest epoch, ms
--       5 highest epoch that the caller knows, or ''  6 bound that no issued epoch reaches: a higher one is forged
--
-- Race: two processes start under one name in the same millisecond, or the clock was set back. Reading and writing in
-- one step gives them different epochs, and the later caller gets the higher one. Or a worker wakes from a pause while
-- another process starts under its name: it may only succeed itself, because otherwise it would fence its successor.
local holder, highest = epochs(KEYS[2], KEYS[1])
if ARGV[5] ~= '' and holder > tonumber(ARGV[5]) then return {string.format('%.0f', holder), 0, garbage} end
if highest >= tonumber(ARGV[6]) then highest = 0 end
local epoch = math.max(tonumber(ARGV[2]), highest + 1)
local text = string.format('%.0f', epoch)
redis.call('UNLINK', KEYS[2]) -- first, so that a full Redis takes the others
redis.call('SET', KEYS[1], text, 'PX', ARGV[4])
redis.call('HSET', KEYS[2], 'epoch', text)
redis.call('PEXPIRE', KEYS[2], ARGV[3])
enlist(ARGV[1], KEYS[3], KEYS[4])
return {text, 1, garbage}
