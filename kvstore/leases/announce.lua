-- Writes a member's value, and lists its id. Returns {garbage}.
--
-- KEYS  1 value  2 set of ids, if the member is listed
-- ARGV  1 value  2 lifetime, ms  3 id
redis.call('UNLINK', KEYS[1]) -- first, so that a full Redis takes the others
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if KEYS[2] then
  make_room(KEYS[2], 'set')
  redis.call('SADD', KEYS[2], ARGV[3])
end
return {garbage}
