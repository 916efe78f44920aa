-- Removes the oldest events of the stream, so that a full Redis has room again. Returns {number of removed events,
-- garbage}. It frees memory, so a full Redis accepts it.
--
-- KEYS  1 event stream
-- ARGV  1 the part of the events that stays, in percent
if not is(KEYS[1], 'stream') then return {0, garbage} end
return {redis.call('XTRIM', KEYS[1], 'MAXLEN', math.floor(redis.call('XLEN', KEYS[1]) * ARGV[1] / 100)), garbage}
