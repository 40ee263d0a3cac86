"""Log copies, counters, keys and ready queues in Redis."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec

from queen.chunks import chunks
from queen.redis.interfaces import TURN_SECONDS, Counted, FillTurn, FillTurnState
from queen.redis.link import RedisLink, Script
from queen.wire.topics.items import ReadyItem

_KEPT_SECONDS: Final = 86_400
"""Copies expire after a day. The position of a file in PostgreSQL outlives them, so they cannot be stored again."""

# A file is listed as long as it has records; both change in one step, so that none is missed.
_ADD: Final = Script("""
redis.call('HSET', KEYS[2], ARGV[2], 1)
redis.call('ZADD', KEYS[1], unpack(ARGV, 3))
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
""")
_TRIM: Final = Script("""
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 0 then
    redis.call('HDEL', KEYS[2], ARGV[2])
end
""")

_AT_ONCE: Final = 1000
"""Redis unpacks a few thousand script arguments into one command."""

_encode = msgspec.msgpack.encode


class Copied(msgspec.Struct, frozen=True, array_like=True):
    """A record of a host's log: its first byte in the file, the byte behind it, and its content."""

    start: int
    end: int
    body: bytes


class RedisCopies:
    """Records that are in the log of a host and not in PostgreSQL yet, for other hosts to store should it be down.

    A sorted set for each file, by the ends of records, and a hash with the files of a shard.
    """

    def __init__(self, link: RedisLink, shard: int) -> None:
        self._link = link
        # Braces: all of a shard is in one slot of a cluster.
        self._names = f"{link.prefix}:wal:{{{shard}}}"

    async def add(self, file_id: str, records: Sequence[Copied]) -> None:
        keys = [self._name(file_id), self._names]
        for some in chunks(records, _AT_ONCE):
            scored = [part for one in some for part in (one.end, _encode(one))]
            await self._link.run(_ADD, keys, [_KEPT_SECONDS, file_id, *scored])

    async def files(self) -> set[str]:
        return {file_id.decode() for file_id in await self._link.command("HKEYS", self._names)}

    async def read(self, file_id: str, since: int, limit: int) -> list[Copied]:
        """The first records of a file that end behind a byte, in order; some may be missing."""
        name = self._name(file_id)
        found = await self._link.command("ZRANGEBYSCORE", name, f"({since}", "+inf", "LIMIT", 0, limit)
        return [_decode_copied(record) for record in found]

    async def trim(self, file_id: str, upto: int) -> None:
        """Remove the records that end at this byte or before."""
        await self._link.run(_TRIM, [self._name(file_id), self._names], [upto, file_id])

    def _name(self, file_id: str) -> str:
        return f"{self._names}:{file_id}"


_decode_copied = msgspec.msgpack.Decoder(Copied).decode

# A hash of seconds, by the clock of Redis. One that is over the limit is not counted.
_ADD_TO_COUNT: Final = Script("""
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
        admitted, left, wait = await self._link.run(
            _ADD_TO_COUNT, [f"{self._link.prefix}:count:{name}"], [count, limit]
        )
        return Counted(bool(admitted), left, wait)


_LEARN: Final = Script("""
for _, name in ipairs(KEYS) do redis.call('SET', name, '', 'PX', ARGV[1]) end
""")

_MOST_TOGETHER: Final = 1000
"""Names in one script: it blocks Redis."""


class RedisKeys:
    """An expiring string for each key. In a cluster the keys of a namespace are in one slot."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def known(self, namespace: str, keys: Sequence[str]) -> set[str]:
        if not keys:
            return set()
        found = await self._link.command("MGET", *self._names(namespace, keys))
        return {key for key, value in zip(keys, found, strict=True) if value is not None}

    async def learn(self, namespace: str, keys: Sequence[str], seconds: float) -> None:
        for some in chunks(keys, _MOST_TOGETHER):
            await self._link.run(_LEARN, self._names(namespace, some), [max(1, int(seconds * 1000))])

    def _names(self, namespace: str, keys: Sequence[str]) -> list[str]:
        # Names hold no control characters, so that no two pairs share a name.
        before = f"{self._link.prefix}:key:{{{namespace}\n}}"
        return [before + key for key in keys]


_KEEP_MS: Final = 3_600_000
_TURN_MS: Final = int(TURN_SECONDS * 1000)
_WISH_MS: Final = 200

_OPEN: Final = Script("""
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
redis.call('ZADD', KEYS[1], 1, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")
# A worker that had to wait comes before the one that had the last turn, or a busy one would starve the others.
_BEGIN: Final = Script("""
local token, limit, me = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if not redis.call('ZSCORE', KEYS[1], token) then return {'lost'} end
if redis.call('EXISTS', KEYS[2]) == 1 then
    if redis.call('GET', KEYS[2]) ~= me then redis.call('SET', KEYS[4], me, 'PX', ARGV[5]) end
    return {'busy'}
end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'lost'} end
local next = redis.call('GET', KEYS[4])
if next and next ~= me then return {'busy'} end
if next then redis.call('DEL', KEYS[4]) end
redis.call('SET', KEYS[2], me, 'PX', ARGV[4])
redis.call('SET', KEYS[3], me)
local items = limit > 0 and redis.call('ZRANGE', KEYS[1], 0, limit - 1) or {}
if items[#items] == token then items[#items] = nil end
return {'yours', redis.call('ZCARD', KEYS[1]) - 1, items, redis.call('ZSCORE', KEYS[1], token)}
""")
_END: Final = Script("""
local token, me, taken = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not redis.call('ZSCORE', KEYS[1], token) or redis.call('GET', KEYS[3]) ~= me then return -1 end
if taken > 0 then redis.call('ZREMRANGEBYRANK', KEYS[1], 0, taken - 1) end
for i = 6, #ARGV do redis.call('ZADD', KEYS[1], 0, ARGV[i]) end
redis.call('ZADD', KEYS[1], ARGV[5], token)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return redis.call('ZCARD', KEYS[1]) - 1
""")

_PLACE: Final = struct.Struct(">IQQ")
_encode_ready = msgspec.msgpack.Encoder().encode
_decode_ready = msgspec.msgpack.Decoder(ReadyItem).decode


class RedisReadyQueue:
    """Sorted sets, by topic."""

    nbytes = 0

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._me = uuid.uuid4().hex

    async def open(self, topic: int, token: str) -> None:
        await self._link.run(_OPEN, self._keys(topic), [token, _KEEP_MS])

    def drop(self, topic: int, token: str) -> None:
        # Its keys expire, also when Redis cannot be reached.
        pass

    async def begin(self, topic: int, token: str, limit: int) -> FillTurn:
        answer = await self._link.run(_BEGIN, self._keys(topic), [token, limit, self._me, _TURN_MS, _WISH_MS])
        state = FillTurnState(answer[0].decode())
        if state is not FillTurnState.YOURS:
            return FillTurn(state)
        items = [_decode_ready(member[_PLACE.size :]) for member in answer[2]]
        return FillTurn(state, items, answer[1], int(answer[3]) - 1)

    async def end(self, topic: int, token: str, number: int, taken: int, offered: Sequence[ReadyItem]) -> int:
        members = [place_bytes(item) + _encode_ready(item) for item in offered]
        depth: int = await self._link.run(
            _END, self._keys(topic), [token, self._me, taken, _KEEP_MS, number + 1, *members]
        )
        return max(0, depth)

    def _keys(self, topic: int) -> list[str]:
        # What is in braces decides the slot of a cluster: all keys of a topic are in one.
        name = f"{self._link.prefix}:ready:{{{topic}}}"
        return [name, f"{name}:turn", f"{name}:open", f"{name}:next"]


def place_bytes(item: ReadyItem) -> bytes:
    """The place in the order of service as bytes that compare as the places do."""
    return _PLACE.pack(item.priority + 2**31, item.due + 2**62, item.id)
