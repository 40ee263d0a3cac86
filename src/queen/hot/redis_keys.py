"""Idempotency keys in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from queen.hot.link import RedisLink, Script

_LEARN: Final = Script("""
for _, name in ipairs(KEYS) do redis.call('SET', name, '', 'PX', ARGV[1]) end
""")

_MOST_TOGETHER: Final = 1000
"""Names in one script: Redis does nothing else meanwhile."""


class RedisKeys:
    """A string each, which Redis forgets by itself. In a cluster the keys of a namespace are in one slot."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def known(self, namespace: str, keys: Sequence[str]) -> set[str]:
        if not keys:
            return set()
        found = await self._link.command("MGET", *self._names(namespace, keys))
        return {key for key, value in zip(keys, found, strict=True) if value is not None}

    async def learn(self, namespace: str, keys: Sequence[str], seconds: float) -> None:
        for start in range(0, len(keys), _MOST_TOGETHER):
            some = keys[start : start + _MOST_TOGETHER]
            await self._link.run(_LEARN, self._names(namespace, some), [max(1, int(seconds * 1000))])

    def _names(self, namespace: str, keys: Sequence[str]) -> list[str]:
        # Names hold no control characters, so that no two pairs share a name.
        before = f"{self._link.prefix}:key:{{{namespace}\n}}"
        return [before + key for key in keys]
