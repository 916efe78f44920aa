-- Events after a position. Returns {events, garbage}: each event is {id, its alternating fields and values}, or {id}
-- alone if it exceeds the size limit.
--
-- KEYS  1 event stream
-- ARGV  1 id of the previous event  2 maximum number of events  3 maximum bytes of one
--       4 bytes after which no more are added
if not is(KEYS[1], 'stream') then return {{}, garbage} end
local STEP = 16 -- entries copied at once, because an entry may have any size
local events, total, after, wanted = {}, 0, ARGV[1], tonumber(ARGV[2])
while #events < wanted and total < tonumber(ARGV[4]) do
  local count = math.min(STEP, wanted - #events)
  local found = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', count)
  for _, entry in ipairs(found) do
    local size = 0
    for _, part in ipairs(entry[2]) do size = size + #part + 8 end -- many small parts add up to a large event
    if size <= tonumber(ARGV[3]) then
      events[#events + 1] = entry
      total = total + size
    else
      events[#events + 1] = {entry[1]}
    end
    after = entry[1]
    if total >= tonumber(ARGV[4]) then break end
  end
  if #found < count then break end
end
return {events, garbage}
