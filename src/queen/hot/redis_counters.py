"""Counts of the last minute in Redis, shared by all workers and hosts."""

from __future__ import annotations

from typing import Final

from queen.hot.interfaces import Counted
from queen.hot.link import RedisLink, Script

# A hash of seconds, by the clock of Redis. One that is over the limit is not counted.
_ADD: Final = Script("""
local now = tonumber(redis.call('TIME')[1])
local count, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local flat = redis.call('HGETALL', KEYS[1])
local used, seconds, counts, old = 0, {}, {}, {}
for i = 1, #flat, 2 do
    local second, n = tonumber(flat[i]), tonumber(flat[i + 1])
    if second <= now - 60 then
        old[#old + 1] = flat[i]
    else
        used = used + n
        counts[second] = n
        seconds[#seconds + 1] = second
    end
end
if #old > 0 then redis.call('HDEL', KEYS[1], unpack(old)) end
if used + count <= limit then
    redis.call('HINCRBY', KEYS[1], now, count)
    redis.call('EXPIRE', KEYS[1], 61)
    return {1, limit - used - count, 0}
end
table.sort(seconds)
local over = used + count - limit
for _, second in ipairs(seconds) do
    over = over - counts[second]
    if over <= 0 then return {0, math.max(0, limit - used), math.max(1, second + 60 - now)} end
end
return {0, math.max(0, limit - used), 60}
""")


class RedisCounters:
    """A hash for each name."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def add(self, name: str, count: int, limit: int) -> Counted:
        admitted, left, wait = await self._link.run(_ADD, [f"{self._link.prefix}:count:{name}"], [count, limit])
        return Counted(bool(admitted), left, wait)
