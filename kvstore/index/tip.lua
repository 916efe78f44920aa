-- The id of the latest event. Returns {it, or '', garbage}.
--
-- KEYS  1 event stream
local latest = is(KEYS[1], 'stream') and redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
return {latest and latest[1] or '', garbage}
