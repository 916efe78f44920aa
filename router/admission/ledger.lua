-- Records a router's entry for a tenant, atomically. `router.admission.account` implements the same in Python and
-- documents the arithmetic.
--
-- KEYS  1 the tenant's account: {windows, answers in flight by router: {version, number, until, tokens reserved}}, as
--         cmsgpack
--
--       5 answers that the router has in flight   6 those of them that it asks for   7 most in flight; '': no limit
--       8 lease of the answers, ms   9 tokens that the router has reserved for them   10 those of them that it asks for;
--       then for each window: length in ms, limit ('': none), room it must have, amount
--
-- Returns {index of the exceeded limit, from 1; 0: none, ms until it has room, {amount in each window}, {ms until each
-- window is empty}, answers in flight on all routers, tokens reserved for them, garbage}.
--
-- Race: two routers ask at the same time, and there is room for one request. The script reads and writes in one step,
-- so one of them is refused.
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local spans, writer, version = tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local held, asked, most, lease = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local reserved, reserving = tonumber(ARGV[9]), tonumber(ARGV[10])

local account
local MOST = 2^20 -- bytes of an account, of which ten routers use some thousands
if is(KEYS[1], 'string') then
  local is_short = redis.call('STRLEN', KEYS[1]) <= MOST
  local text = is_short and redis.call('GET', KEYS[1])
  if not is_short then report(KEYS[1]) end
  if text then
    local ok, found = pcall(cmsgpack.unpack, text)
    if ok and type(found) == 'table' and type(found[1]) == 'table' and type(found[2]) == 'table' then
      account = found
    else
      report(KEYS[1])
    end
  end
else
  redis.call('UNLINK', KEYS[1])
end
account = account or {{}, {}}

local function count(value) return type(value) == 'number' and value >= 0 and value <= MAX_SEQ end

local seats, others, others_reserved = {}, 0, 0
for name, seat in pairs(account[2]) do
  if not (type(seat) == 'table' and count(seat[1]) and count(seat[2]) and count(seat[3]) and count(seat[4])) then
    report(KEYS[1])
  elseif seat[3] > now then
    seats[name] = seat
    if name ~= writer then others, others_reserved = others + seat[2], others_reserved + seat[4] end
  end
end
local own = seats[writer]
local is_late = own and own[1] > version
local before = others_reserved + (is_late and own[4] or reserved - reserving)

local windows, refused, retry, life = {}, 0, 0, 0
for index = 1, (#ARGV - 10) / 4 do
  local at = 7 + index * 4
  local span_ms = ARGV[at] / spans
  local window = {
    span_ms = span_ms, current = math.floor(now / span_ms), limit = tonumber(ARGV[at + 1]),
    need = tonumber(ARGV[at + 2]), amount = tonumber(ARGV[at + 3]), used = 0, amounts = {},
  }
  local noted = account[1][index]
  for span, amount in pairs(type(noted) == 'table' and noted or {}) do
    if not (count(span) and count(amount)) then
      report(KEYS[1])
    elseif span >= window.current - spans and span <= window.current then -- later ones: the clock was set back
      window.amounts[span] = amount
      window.used = window.used + amount
    end
  end
  local excess = window.limit and window.need > 0 and window.used + window.need - window.limit or 0
  if excess > 0 and refused == 0 then
    refused = index
    local kept, last = {}, 0
    for span in pairs(window.amounts) do kept[#kept + 1] = span end
    table.sort(kept)
    for _, span in ipairs(kept) do
      last, excess = span, excess - window.amounts[span]
      if excess <= 0 then break end
    end
    retry = math.max(0, (last + spans + 1) * span_ms - now)
  elseif index > 1 and window.limit and window.need > 0 and refused == 0 -- the others are of tokens
    and window.used + window.need + before > window.limit then
    refused = index
  end
  windows[index] = window
end

if refused == 0 and asked > 0 and most and others + (is_late and own[2] or held) > most then
  refused = #windows + 1
end
local kept_reserved = reserved - (refused > 0 and reserving or 0)
if (most or kept_reserved > 0 or own) and not is_late then -- zero is recorded, too: an older entry may arrive later
  seats[writer] = {version, held - (refused > 0 and asked or 0), now + lease, kept_reserved}
end
if next(seats) then life = lease end

local kept, used, reset = {}, {}, {}
for index, window in ipairs(windows) do
  if refused == 0 and window.limit and window.amount > 0 then
    window.amounts[window.current] = (window.amounts[window.current] or 0) + window.amount
    window.used = window.used + window.amount
  end
  local last
  for span in pairs(window.amounts) do last = math.max(last or 0, span) end
  kept[index], used[index] = window.amounts, window.used
  reset[index] = last and (last + spans + 1) * window.span_ms - now or 0
  life = math.max(life, reset[index])
end
if life > 0 then
  redis.call('PEXPIRE', KEYS[1], math.ceil(life)) -- first, so that a full Redis takes the account
  redis.call('SET', KEYS[1], cmsgpack.pack({kept, seats}), 'PX', math.ceil(life))
end
local mine = seats[writer] or {0, 0, 0, 0}
return {refused, math.ceil(retry), used, reset, others + mine[2], others_reserved + mine[4], garbage}
