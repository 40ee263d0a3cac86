"""Copies of logs in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from queen.hot.interfaces import Copied
from queen.hot.link import RedisLink, Script

_KEPT_SECONDS: Final = 86_400
"""Copies go after a day. What PostgreSQL says of a file outlives them, or they could be stored again."""

# A file is named as long as it has records: both change in one step, so that none is overlooked.
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
"""Redis takes a few thousand arguments of a script for one command."""

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Copied).decode


class RedisCopies:
    """A sorted set for each file, by where records end, and a hash that names the files of a shard."""

    def __init__(self, link: RedisLink, shard: int) -> None:
        self._link = link
        # Braces: all of a shard is in one slot of a cluster.
        self._names = f"{link.prefix}:wal:{{{shard}}}"

    async def add(self, file_id: str, records: Sequence[Copied]) -> None:
        keys = [self._name(file_id), self._names]
        for first in range(0, len(records), _AT_ONCE):
            scored = [part for one in records[first : first + _AT_ONCE] for part in (one.end, _encode(one))]
            await self._link.run(_ADD, keys, [_KEPT_SECONDS, file_id, *scored])

    async def files(self) -> set[str]:
        return {file_id.decode() for file_id in await self._link.command("HKEYS", self._names)}

    async def read(self, file_id: str, since: int, limit: int) -> list[Copied]:
        name = self._name(file_id)
        found = await self._link.command("ZRANGEBYSCORE", name, f"({since}", "+inf", "LIMIT", 0, limit)
        return [_decode(record) for record in found]

    async def trim(self, file_id: str, upto: int) -> None:
        await self._link.run(_TRIM, [self._name(file_id), self._names], [upto, file_id])

    def _name(self, file_id: str) -> str:
        return f"{self._names}:{file_id}"
