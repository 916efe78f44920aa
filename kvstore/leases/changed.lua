-- Leases that have changed since they were read last. Returns {{a result for each lease}, garbage}: false if there is
-- none; a text that says why it cannot be read; a list of its renewal alone if its epoch and the start of its chain are
-- the known ones; or a list of its fields. A value above its size limit is neither copied nor sent.
--
-- KEYS  the leases, then the highest epoch of each of their workers
-- ARGV  1 number of fields, then the name and the maximum bytes of each: epoch, start of the chain and renewal first;
--       then the known EPOCH/START of each lease, or ''
local num_fields, num_leases = tonumber(ARGV[1]), #KEYS / 2
local NUM_VERSION = 3 -- fields that tell whether a lease has changed

local names = {}
for field = 1, num_fields do names[field] = ARGV[2 * field] end

local function too_long(key, first, last)
  for field = first, last do
    local length, most = redis.call('HSTRLEN', key, names[field]), tonumber(ARGV[2 * field + 1])
    if length > most then return 'a field of it has ' .. length .. ' bytes, and may have ' .. most end
  end
end

local function lease_at(key, known)
  local there = redis.call('TYPE', key).ok
  if there == 'none' then return false end
  if there ~= 'hash' then return 'WRONGTYPE: a ' .. there .. ' in the place of a hash' end
  local problem = too_long(key, 1, NUM_VERSION)
  if problem then return problem end
  if known ~= '' then
    local epoch, since, renewal = unpack(redis.call('HMGET', key, unpack(names, 1, NUM_VERSION)))
    if epoch and since and renewal and epoch .. '/' .. since == known then return {renewal} end
  end
  return too_long(key, NUM_VERSION + 1, num_fields) or redis.call('HMGET', key, unpack(names))
end

local found = {}
for at = 1, num_leases do
  found[at] = lease_at(KEYS[at], ARGV[2 * num_fields + 1 + at])
  number_at(KEYS[num_leases + at], MAX_EPOCH) -- only its owner, which shows nothing, reads the highest epoch
end
return {found, garbage}
