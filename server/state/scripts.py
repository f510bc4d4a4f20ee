"""What Redis does at once for the shared state, in Lua. KEYS and ARGV are named above each script.

Times are of Redis' clock, in seconds.
"""

_NOW = """
local t = redis.call('TIME')
local now = t[1] + t[2] / 1e6
"""

# An account's hash {used, at}; limit, tokens. Returns the tokens that were used before.
TAKE = (
    _NOW
    + """
local limit, kept = tonumber(ARGV[1]), redis.call('HMGET', KEYS[1], 'used', 'at')
local used = math.max(0, (kept[1] or 0) - (now - (kept[2] or now)) * limit / 60)
local left = used
if used < limit then left = used + ARGV[2] end
redis.call('HSET', KEYS[1], 'used', left, 'at', now)
redis.call('EXPIRE', KEYS[1], math.ceil(left * 60 / limit) + 1)
return tostring(used)
"""
)

# An account's hash; tokens. One that has expired has nothing to take them from.
GIVE_BACK = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'used', math.max(0, redis.call('HGET', KEYS[1], 'used') - ARGV[1]))
end
"""

# An account's sorted set of leases by their ends; limit, seconds, lease. Returns 1 if it is new.
ENTER = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
)

# An account's sorted set. Returns the leases that have not ended.
LIVING = _NOW + "return redis.call('ZRANGEBYSCORE', KEYS[1], now, '+inf')"

# An account's sorted set; seconds, leases.
RENEW = (
    _NOW
    + """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""
)

# Responses are fields of one hash, by `owner id`. Each owner has a sorted set of its ids by age;
# two more tell the bytes and the number of each owner's responses, a hash those of all.
_FORGET = """
local function forget(owner, id)
  local field = owner .. ' ' .. id
  local bytes = redis.call('HGET', KEYS[1] .. ':sizes', field)
  redis.call('ZREM', KEYS[1] .. ':of:' .. owner, id)
  if not bytes then return 0 end
  redis.call('HDEL', KEYS[1], field)
  redis.call('HDEL', KEYS[1] .. ':sizes', field)
  for what, n in pairs({bytes = -bytes, count = -1}) do
    redis.call('HINCRBY', KEYS[1] .. ':all', what, n)
    if tonumber(redis.call('ZINCRBY', KEYS[1] .. ':' .. what, n, owner)) <= 0 then
      redis.call('ZREM', KEYS[1] .. ':' .. what, owner)
    end
  end
  return 1
end
"""

# The hash of responses; owner, id. Returns 1 if there was one.
POP = _FORGET + "return forget(ARGV[1], ARGV[2])"

# The hash; owner, id, most bytes, most responses, bytes, value. Where Redis' policy has dropped one
# of the keys, the others go too: the oldest response would be looked for without end.
PUT = (
    _FORGET
    + """
local function clear(owner)
  for _, other in ipairs(redis.call('ZRANGE', KEYS[1] .. ':count', 0, -1)) do
    redis.call('DEL', KEYS[1] .. ':of:' .. other)
  end
  redis.call('DEL', KEYS[1] .. ':of:' .. owner)
  for _, part in ipairs({'', ':sizes', ':all', ':bytes', ':count'}) do
    redis.call('DEL', KEYS[1] .. part)
  end
end
local owner, id, most = ARGV[1], ARGV[2], {bytes = tonumber(ARGV[3]), count = tonumber(ARGV[4])}
local field, n = owner .. ' ' .. id, tonumber(redis.call('HGET', KEYS[1] .. ':all', 'count') or 0)
local n_own = tonumber(redis.call('ZSCORE', KEYS[1] .. ':count', owner) or 0)
if n ~= redis.call('HLEN', KEYS[1]) or n ~= redis.call('HLEN', KEYS[1] .. ':sizes')
  or n_own ~= redis.call('ZCARD', KEYS[1] .. ':of:' .. owner) then clear(owner) end
if redis.call('HSETNX', KEYS[1] .. ':sizes', field, ARGV[5]) == 0 then return end
redis.call('HSET', KEYS[1], field, ARGV[6])
local age = redis.call('HINCRBY', KEYS[1] .. ':all', 'age', 1)
redis.call('ZADD', KEYS[1] .. ':of:' .. owner, age, id)
for what, n in pairs({bytes = ARGV[5], count = 1}) do
  redis.call('HINCRBY', KEYS[1] .. ':all', what, n)
  redis.call('ZINCRBY', KEYS[1] .. ':' .. what, n, owner)
end
for _, what in ipairs({'count', 'bytes'}) do
  while tonumber(redis.call('HGET', KEYS[1] .. ':all', what)) > most[what] do
    local first = redis.call('ZREVRANGE', KEYS[1] .. ':' .. what, 0, 0)[1]
    local oldest = first and redis.call('ZRANGE', KEYS[1] .. ':of:' .. first, 0, 0)[1]
    if not oldest then return clear(owner) end
    forget(first, oldest)
  end
end
"""
)

# The hash of records by id, beside it the number of their changes and the ids of the last ones, the
# newest first; a version that is known. Returns the version, and ids and records that have changed
# since, '' for those that are gone; nil if the changes are unknown.
PULL = """
local version = tonumber(redis.call('GET', KEYS[1] .. ':version') or 0)
local n = version - ARGV[1]
if tonumber(ARGV[1]) < 0 or n < 0 or n > redis.call('LLEN', KEYS[1] .. ':changed') then
  return {version, false}
end
local found = {}
for _, id in ipairs(n > 0 and redis.call('LRANGE', KEYS[1] .. ':changed', 0, n - 1) or {}) do
  table.insert(found, id)
  table.insert(found, redis.call('HGET', KEYS[1], id) or '')
end
return {version, found}
"""

# The hash of records; the version that is to be changed, ids and records, '' for none. Returns 1.
PUSH = """
if (redis.call('GET', KEYS[1] .. ':version') or '0') ~= ARGV[1] then return 0 end
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[1], ARGV[i])
  else redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  redis.call('LPUSH', KEYS[1] .. ':changed', ARGV[i])
  redis.call('INCR', KEYS[1] .. ':version')
end
redis.call('LTRIM', KEYS[1] .. ':changed', 0, 999)
return 1
"""

# The sorted set of a work's claimed parts by the ends of their leases, beside it a hash {next,
# finished, amounts}; number of parts, seconds of a lease, seconds for which both are kept.
CLAIM = (
    _NOW
    + """
local part = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if not part then
  part = tonumber(redis.call('HGET', KEYS[1] .. ':done', 'next') or 0)
  if part >= tonumber(ARGV[1]) then return end
  redis.call('HINCRBY', KEYS[1] .. ':done', 'next', 1)
end
redis.call('ZADD', KEYS[1], now + ARGV[2], part)
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[1] .. ':done', ARGV[3])
return tonumber(part)
"""
)

# The sorted set; part, names and amounts. Only what is still claimed counts.
FINISH = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return end
redis.call('HINCRBY', KEYS[1] .. ':done', 'finished', 1)
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1] .. ':done', ARGV[i], ARGV[i + 1]) end
"""

# Sorted sets; seconds until the claims end, of each set a part.
HOLD = (
    _NOW
    + """
for i, key in ipairs(KEYS) do redis.call('ZADD', key, 'XX', now + ARGV[1], ARGV[i + 1]) end
"""
)
