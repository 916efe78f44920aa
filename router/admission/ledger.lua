-- Records a router's entries in accounts of a tenant, atomically: all of them, or none if one has no room.
-- `router.admission.account` implements the same in Python and documents the arithmetic.
--
-- KEYS  the accounts: {windows, answers in flight by router: {version, number, until, tokens reserved}}, as cmsgpack
--
-- ARGV  1 time in ms since 1970; '': the time of Redis   2 number of spans in a window   3 name of the router's
--         process; then for each account:
--       1 version   2 answers that the router has in flight   3 those of them that it asks for   4 most in flight;
--       '': no limit   5 lease of the answers, ms   6 tokens that the router has reserved for them   7 those of them
--       that it asks for; then for each window: length in ms, limit ('': none), room it must have, amount
--
-- Returns for each account {index of the exceeded limit, from 1; 0: none, ms until it has room, {amount in each
-- window}, {ms until each window is empty}, answers in flight on all routers, tokens reserved for them}; then garbage.
--
-- Race: two routers ask at the same time, and there is room for one request. The script reads and writes in one step,
-- so one of them is refused. It writes no account before it has examined all: none records what another refuses.
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local spans, writer = tonumber(ARGV[2]), ARGV[3]
local MOST = 2^20 -- bytes of an account, of which ten routers use some thousands
local COMMON, OWN, OF_WINDOW = 3, 7, 4 -- numbers of arguments: of all accounts, of one account, of one window
local num_arguments = (#ARGV - COMMON) / #KEYS

local function load(key)
  local account
  if is(key, 'string') then
    local is_short = redis.call('STRLEN', key) <= MOST
    local text = is_short and redis.call('GET', key)
    if not is_short then report(key) end
    if text then
      local ok, found = pcall(cmsgpack.unpack, text)
      if ok and type(found) == 'table' and type(found[1]) == 'table' and type(found[2]) == 'table' then
        account = found
      else
        report(key)
      end
    end
  else
    redis.call('UNLINK', key)
  end
  return account or {{}, {}}
end

local function count(value) return type(value) == 'number' and value >= 0 and value <= MAX_SEQ end

local function wait(window, excess) -- ms until `excess` has left it
  local kept, last = {}, 0
  for span in pairs(window.amounts) do kept[#kept + 1] = span end
  table.sort(kept)
  for _, span in ipairs(kept) do
    last, excess = span, excess - window.amounts[span]
    if excess <= 0 then break end
  end
  return math.max(0, (last + spans + 1) * window.span_ms - now)
end

-- The account at a key without what has expired, an entry's arguments, and the limit that the entry would exceed.
local function examine(key, number)
  local before_it = COMMON + (number - 1) * num_arguments
  local function argument(index) return tonumber(ARGV[before_it + index]) end
  local entry = {
    version = argument(1), held = argument(2), asked = argument(3), most = argument(4), lease = argument(5),
    reserved = argument(6), reserving = argument(7),
    seats = {}, others = 0, others_reserved = 0, windows = {}, refused = 0, retry = 0,
  }
  local account = load(key)
  for name, seat in pairs(account[2]) do
    if not (type(seat) == 'table' and count(seat[1]) and count(seat[2]) and count(seat[3]) and count(seat[4])) then
      report(key)
    elseif seat[3] > now then
      entry.seats[name] = seat
      if name ~= writer then
        entry.others, entry.others_reserved = entry.others + seat[2], entry.others_reserved + seat[4]
      end
    end
  end
  local own = entry.seats[writer]
  entry.is_late = own and own[1] > entry.version
  local before = entry.others_reserved + (entry.is_late and own[4] or entry.reserved - entry.reserving)

  for index = 1, (num_arguments - OWN) / OF_WINDOW do
    local at = OWN + (index - 1) * OF_WINDOW
    local span_ms = argument(at + 1) / spans
    local window = {
      span_ms = span_ms, current = math.floor(now / span_ms), limit = argument(at + 2), need = argument(at + 3),
      amount = argument(at + 4), used = 0, amounts = {},
    }
    local noted = account[1][index]
    for span, amount in pairs(type(noted) == 'table' and noted or {}) do
      if not (count(span) and count(amount)) then
        report(key)
      elseif span >= window.current - spans and span <= window.current then -- later ones: the clock was set back
        window.amounts[span] = amount
        window.used = window.used + amount
      end
    end
    local excess = window.limit and window.need > 0 and window.used + window.need - window.limit or 0
    if excess > 0 and entry.refused == 0 then
      entry.refused, entry.retry = index, wait(window, excess)
    elseif index > 1 and window.limit and window.need > 0 and entry.refused == 0 -- the others are of tokens
      and window.used + window.need + before > window.limit then
      entry.refused = index
    end
    entry.windows[index] = window
  end
  local held = entry.is_late and own[2] or entry.held
  if entry.refused == 0 and entry.asked > 0 and entry.most and entry.others + held > entry.most then
    entry.refused = #entry.windows + 1
  end
  return entry
end

-- Write an account with an entry or, if the request is refused, without its amounts; return the answer.
local function record(key, entry, is_refused)
  local seats, life = entry.seats, 0
  local kept_reserved = entry.reserved - (is_refused and entry.reserving or 0)
  if (entry.most or kept_reserved > 0 or seats[writer]) and not entry.is_late then
    -- zero is recorded, too: an older entry may arrive later
    seats[writer] = {entry.version, entry.held - (is_refused and entry.asked or 0), now + entry.lease, kept_reserved}
  end
  if next(seats) then life = entry.lease end

  local kept, used, reset = {}, {}, {}
  for index, window in ipairs(entry.windows) do
    if not is_refused and window.limit and window.amount > 0 then
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
    redis.call('PEXPIRE', key, math.ceil(life)) -- first, so that a full Redis takes the account
    redis.call('SET', key, cmsgpack.pack({kept, seats}), 'PX', math.ceil(life))
  end
  local mine = seats[writer] or {0, 0, 0, 0}
  return {entry.refused, math.ceil(entry.retry), used, reset, entry.others + mine[2], entry.others_reserved + mine[4]}
end

local entries, is_refused, answers = {}, false, {}
for number, key in ipairs(KEYS) do
  entries[number] = examine(key, number)
  is_refused = is_refused or entries[number].refused > 0
end
for number, key in ipairs(KEYS) do answers[number] = record(key, entries[number], is_refused) end
answers[#answers + 1] = garbage
return answers
