"""Keys that were enqueued lately: their items are there already, so there is nothing to store.

A repeated request mostly comes soon after the first. Where its key is remembered, by any host that shares the Redis,
it costs PostgreSQL a look instead of locks and a write that comes to nothing. What is remembered may be wrong or gone
at any moment, so PostgreSQL is asked for the item; what is not remembered is stored as ever, and found to be a
duplicate there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from queen.background import Errands
from queen.errors import RedisAway
from queen.hot.interfaces import Keys

if TYPE_CHECKING:
    from queen.broker.topics.enqueue import Entry

_SECONDS: Final = 600.0


class SeenKeys:
    """What was stored under a key, here or elsewhere, in the last minutes."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._errands = Errands()

    async def stop(self) -> None:
        await self._errands.finish()

    async def repeated(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those of the entries, all with keys, that were probably stored before."""
        found: list[Entry] = []
        for namespace, own in _by_namespace(entries).items():
            try:
                known = await self._keys.known(namespace, [entry.item.idempotency_key or "" for entry in own])
            except RedisAway:
                return []
            found += [entry for entry in own if entry.item.idempotency_key in known]
        return found

    def note(self, entries: Iterable[Entry]) -> None:
        """These were stored, or found to be; nobody waits until that is known everywhere."""
        self._errands.spawn(self._learn(_by_namespace(entries)))

    async def _learn(self, entries: dict[str, list[Entry]]) -> None:
        for namespace, own in entries.items():
            try:
                await self._keys.learn(namespace, [entry.item.idempotency_key or "" for entry in own], _SECONDS)
            except RedisAway:
                return


def _by_namespace(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.item.namespace, []).append(entry)
    return found
