"""Idempotency keys in Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from queen.hot.link import RedisLink


class RedisKeys:
    """A string each, which Redis forgets by itself."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def reserve(self, namespace: str, ids: Mapping[str, int], seconds: float) -> dict[str, int]:
        if not ids:
            return {}
        lasting = max(1, int(seconds * 1000))
        names = {key: self._name(namespace, key) for key in ids}
        given = [("SET", names[key], id, "NX", "PX", lasting) for key, id in ids.items()]
        answers = await self._link.together([*given, *(("GET", name) for name in names.values())])
        # One that was forgotten between the two is nobody's, so it is the caller's.
        return {
            key: id if owner is None else int(owner)
            for (key, id), owner in zip(ids.items(), answers[len(given) :], strict=True)
        }

    async def lookup(self, namespace: str, keys: Sequence[str]) -> dict[str, int]:
        if not keys:
            return {}
        found = await self._link.together([("GET", self._name(namespace, key)) for key in keys])
        return {key: int(id) for key, id in zip(keys, found, strict=True) if id is not None}

    async def forget(self, namespace: str, keys: Sequence[str]) -> None:
        if keys:
            await self._link.together([("DEL", self._name(namespace, key)) for key in keys])

    def _name(self, namespace: str, key: str) -> str:
        # Names hold no control characters, so that no two pairs share a name.
        return f"{self._link.prefix}:key:{namespace}\n{key}"
