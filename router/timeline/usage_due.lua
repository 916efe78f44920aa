-- Lists the marks whose record is due. Returns {their members, garbage}. Members that are too long are removed.
--
-- KEYS  1 the marks that hold a record
-- ARGV  1 now, ms  2 maximum number of members  3 maximum bytes of a member
if not is(KEYS[1], 'zset') then return {{}, garbage} end
local due = {}
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], 0, ARGV[1], 'LIMIT', 0, ARGV[2])) do
  if #member <= tonumber(ARGV[3]) then
    due[#due + 1] = member
  else
    redis.call('ZREM', KEYS[1], member)
    report(KEYS[1])
  end
end
return {due, garbage}
