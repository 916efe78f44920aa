-- Applies one block event, or returns why it does not.
--
-- KEYS  1 lease  2 seq  3 blocks  4 snapshot parts  5 event stream  6 highest epoch  7 seal  8 bytes appended
-- ARGV  1 worker id  2 epoch  3 seq  4 op  5 packed entries  6 number of keys  7 ttl, ms
--       8 proof for the stream; '': nothing is signed  9 seal
--       10 maximum age of an event in the stream, ms  11 maximum number of them  12 maximum bytes
--       13 load of the worker; '': the event reports none
-- Returns {'applied' | 'resync' | 'fenced', last seq or the epoch that holds the lease, garbage}.
local lease, seq_key, blocks, parts, stream = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local seq, op, packed, num_keys = tonumber(ARGV[3]), ARGV[4], ARGV[5], tonumber(ARGV[6])
local CHUNK = 4000 -- unpack() fails near 8000 arguments

-- Race: a worker wakes from a long pause after its successor took the name. If the check and the write were two steps,
-- its late event would credit the successor's cold cache with blocks that it does not hold.
local held = redis.call('EXISTS', lease) == 1 and epochs(lease, KEYS[6]) or 0
if held > tonumber(ARGV[2]) then return {'fenced', string.format('%.0f', held), garbage} end
-- These keys share one lifetime: if one has a wrong type or form, all count as lost.
local is_readable = is(seq_key, 'string') and is(blocks, 'set') and is(parts, 'set')
local last = is_readable and (redis.call('EXISTS', seq_key) == 0 and 0 or number_at(seq_key, MAX_SEQ))
if not last then
  redis.call('UNLINK', seq_key, blocks, parts)
  last = 0
end
-- No lease, or an older one: this store lost its state, and the worker's next renewal restores it.
if held < tonumber(ARGV[2]) then return {'resync', last, garbage} end

-- Race: an event was lost (the worker's queue overflowed, or a connection broke before or after the script ran), and
-- the next one arrives. Applying it would leave a wrong set, and no reader would ever notice.
if op == 'snap' then
  if seq <= last then return {'resync', last, garbage} end
elseif seq ~= last + 1 then
  return {'resync', last, garbage}
end
if op == 'snap.' and redis.call('SCARD', parts) ~= num_keys then return {'resync', last, garbage} end

-- The entries of one event belong to one tier, so they have one length.
local function each_chunk(command, key)
  if #packed == 0 then return end
  local size = #packed / num_keys
  for first = 1, #packed, CHUNK * size do
    local members = {}
    for at = first, math.min(first + CHUNK * size, #packed + 1) - 1, size do
      members[#members + 1] = string.sub(packed, at, at + size - 1)
    end
    redis.call(command, key, unpack(members))
  end
end

-- First, so that a full Redis refuses what grows, and nothing has changed. It takes what frees memory.
if op == '+' or op == 'snap' or op == 'snap+' then redis.call('SET', seq_key, ARGV[3]) end
if op == '+' then each_chunk('SADD', blocks)
elseif op == '-' then each_chunk('SREM', blocks)
elseif op == 'clear' then redis.call('UNLINK', blocks)
elseif op == 'snap' then redis.call('UNLINK', parts)
elseif op == 'snap+' then each_chunk('SADD', parts)
else
  redis.call('UNLINK', blocks) -- RENAME would free it at once, however many entries it has
  if num_keys > 0 then redis.call('RENAME', parts, blocks) end
end

-- Race: two writers between set and stream. Because the event is appended in the same step, the stream's order is the
-- sets' order, so a reader that scans a set and then replays the stream arrives at the set.
redis.call('SET', seq_key, ARGV[3])
if ARGV[9] ~= '' then redis.call('SET', KEYS[7], ARGV[9]) end
local added = #packed + #ARGV[8] + #ARGV[13] + EVENT_OVERHEAD
local total = stream_bytes(KEYS[8]) + added
make_room(KEYS[8], 'string')
redis.call('SET', KEYS[8], string.format('%.0f', total))
local function append(call)
  local fields = {'w', ARGV[1], 'e', ARGV[2], 'q', ARGV[3], 'o', op, 'k', packed, 'n', ARGV[6]}
  fields[13], fields[14] = 'b', string.format('%.0f', total)
  if ARGV[8] ~= '' then fields[#fields + 1], fields[#fields + 2] = 's', ARGV[8] end
  if ARGV[13] ~= '' then fields[#fields + 1], fields[#fields + 2] = 'l', ARGV[13] end
  return call('XADD', stream, '*', unpack(fields))
end
make_room(stream, 'stream')
local id = append(redis.pcall)
if type(id) ~= 'string' then -- after the last id that a stream can have, none can be appended
  garbage[#garbage + 1] = stream
  redis.call('UNLINK', stream)
  id = append(redis.call)
end

-- The stream must not push leases out of Redis. Readers that it has left behind scan the sets.
local oldest = tonumber(string.match(id, '^%d+')) - tonumber(ARGV[10])
redis.call('XTRIM', stream, 'MINID', '~', string.format('%.0f', math.max(0, oldest)))
redis.call('XTRIM', stream, 'MAXLEN', '~', ARGV[11])
local STEP = 65536 -- bytes between two looks at the first event
if math.floor(total / STEP) ~= math.floor((total - added) / STEP) then
  bound_stream(stream, total, tonumber(ARGV[12]))
end
for _, key in ipairs({seq_key, blocks, parts, KEYS[7]}) do redis.call('PEXPIRE', key, ARGV[7]) end
return {'applied', seq, garbage}
