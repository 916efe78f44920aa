-- Precedes every script. Each script returns its results in a list, whose last element is `garbage`.
--
-- A script that fails at a value of a wrong type would fail at it forever, and halfway: Redis undoes nothing.
--
-- A Redis whose memory is used up refuses a script's first write, unless it adds nothing, and accepts all that follow.
-- So the scripts of small values without which workers would be lost begin with a write that adds nothing. The scripts
-- of the index do not, since they would fill the memory of the machine.
local garbage = {} -- keys that held an unexpected value, each once

local function report(key)
  for _, reported in ipairs(garbage) do
    if reported == key then return end
  end
  garbage[#garbage + 1] = key
end

local function is(key, kind)
  local found = redis.call('TYPE', key).ok
  if found == kind or found == 'none' then return true end
  report(key)
  return false
end

local function make_room(key, kind) -- before a write
  if is(key, kind) then return false end
  redis.call('UNLINK', key)
  return true
end

local function natural(text, most, key) -- nil: there is none
  if not text then return nil end
  local number = string.match(text, '^%d+$') and tonumber(text)
  if number and number <= most then return number end
  report(key)
  return nil
end

-- The number in a string, or in a field of a hash; nil: there is none, or it cannot be read. A value that is longer
-- than a number is not copied.
local function number_at(key, most, field)
  if not is(key, field and 'hash' or 'string') then return nil end
  local length = field and redis.call('HSTRLEN', key, field) or redis.call('STRLEN', key)
  if length > 16 then
    report(key)
    return nil
  end
  return natural(field and redis.call('HGET', key, field) or not field and redis.call('GET', key), most, key)
end

local MAX_EPOCH = 4398046511104 -- 2^42 ms: the year 2109
local MAX_SEQ = 9007199254740991 -- 2^53 - 1: beyond it numbers are not exact

-- Without the set of ids no worker is listed until it renews. A loss of the store's state has the same effect, so the
-- loss of the set is reported as one.
local function enlist(id, ids, boot)
  if make_room(ids, 'set') then redis.call('UNLINK', boot) end
  redis.call('SADD', ids, id)
end

-- The epoch that holds a worker's id, and the highest issued epoch; 0: none. The first is the lesser of two copies that
-- are only ever written together, so a forged copy cannot fence off a worker.
local function epochs(lease, highest)
  local leased, given = number_at(lease, MAX_EPOCH, 'epoch'), number_at(highest, MAX_EPOCH)
  return math.min(leased or given or 0, given or leased or 0), math.max(leased or 0, given or 0)
end

local EVENT_OVERHEAD = 96 -- approximate bytes of an event in the stream in addition to its entries and its proof

-- The bytes that were ever appended to the event stream; each event contains the number as of then.
local function stream_bytes(key) return number_at(key, MAX_SEQ - 2 ^ 30) or 0 end

-- Removes the oldest events until about `most` bytes are left. A number that cannot be read counts as too large.
local function bound_stream(stream, total, most)
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local since
  for at = 1, first and #first[2] or 0, 2 do
    if first[2][at] == 'b' then since = tonumber(first[2][at + 1]) end
  end
  local bytes = since and total - since
  if not bytes or bytes < 0 then bytes = 2 * most end
  if bytes > most then redis.call('XTRIM', stream, 'MAXLEN', math.floor(redis.call('XLEN', stream) * most / bytes)) end
end
