"""Idempotency keys and quotas of namespaces whose topics lie on several shards.

A namespace has a home shard, which counts the quota and records which shard owns a key. A key is claimed there before
its item is stored; the owner then stores a key at most once. A crash between the two leaves a claim without an item: a
retry of the request on the same shard uses the claim, another shard may take the key over after a timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from queen.broker.broker import Broker
from queen.broker.sharding.directory import Directory
from queen.broker.topics.batching import RequestBatcher
from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.log.quotas import Quotas
from queen.storage.database import Database
from queen.wire.shards import Name
from queen.wire.topics.requests import EnqueueItem

log = logging.getLogger(__name__)

# Longer than any statement may take: the owner of the claim has stored its item by then, or never will.
_ABANDONED_SECONDS: Final = 120.0


Key: TypeAlias = tuple[str, str]
"""A namespace, and a key in it."""


@dataclass(slots=True, eq=False)
class _Wanted:
    shards: dict[Key, int]
    answer: asyncio.Future[dict[Key, tuple[int, float]]]


@dataclass(slots=True)
class Duplicates:
    """Items of a request, by position, that are duplicates and not stored."""

    owners: dict[int, int] = field(default_factory=dict)
    """The item on another shard that has the key."""
    twins: dict[int, int] = field(default_factory=dict)
    """The item earlier in the request that has the key, and goes to another shard."""

    def __contains__(self, place: int) -> bool:
        return place in self.owners or place in self.twins

    def __bool__(self) -> bool:
        return bool(self.owners or self.twins)


class KeyRegister:
    """Claims of keys on one home shard; concurrent requests are batched into one statement."""

    def __init__(self, database: Database) -> None:
        self._link = database.link()
        self._batcher: RequestBatcher[_Wanted] = RequestBatcher(
            self._run,
            weigh=lambda wanted: len(wanted.shards),
            limit=5000,
            tenant=lambda wanted: next(iter(wanted.shards))[0],
        )

    def claim(self, shards: dict[Key, int]) -> asyncio.Future[dict[Key, tuple[int, float]]]:
        """Claim keys for shards, unless they are claimed; gives the owner of each, and since how many seconds."""
        wanted = _Wanted(shards, asyncio.get_running_loop().create_future())
        self._batcher.submit(wanted)
        return wanted.answer

    async def _run(self, batch: list[_Wanted]) -> None:
        claims = [(key, shard) for wanted in batch for key, shard in wanted.shards.items()]
        columns = ([key[0] for key, _ in claims], [key[1] for key, _ in claims], [shard for _, shard in claims])
        owners: dict[Key, tuple[int, float]] = {}
        while len(owners) < len({key for key, _ in claims}):
            # A second time if another session claimed one concurrently: its row is visible then.
            rows = await self._link.fetch("claim_topic_keys", *columns)
            owners |= {(row["namespace"], row["key"]): (row["shard"], row["age"]) for row in rows}
        for wanted in batch:
            if not wanted.answer.done():
                wanted.answer.set_result({key: owners[key] for key in wanted.shards})


class NamespaceRules:
    """Quotas and idempotency keys of namespaces over all shards."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers
        self._registers = [KeyRegister(broker.database) for broker in brokers]
        for broker in brokers:
            broker.topics.quotas.find_home = self._quotas_of

    async def admit(self, items: Sequence[EnqueueItem], shards: Sequence[int]) -> None:
        """Count items against their quotas, on the home shard of each namespace. Raises `QuotaExceeded`."""
        by_home: dict[int, list[EnqueueItem]] = {}
        stored_at_home: set[int] = set()
        for item, shard in zip(items, shards, strict=True):
            home = await self._home(item.namespace)
            by_home.setdefault(home, []).append(item)
            if home == shard:
                stored_at_home.add(home)
        counted: list[int] = []
        try:
            for home, some in by_home.items():
                try:
                    await self._brokers[home].topics.quotas.count(some)
                    counted.append(home)
                except DatabaseUnavailable:
                    if home in stored_at_home:
                        raise
                    # Availability before exactness: items of other shards are admitted over quota.
                    log.warning("shard %d is unavailable: quotas of its namespaces are not enforced", home)
        except QueenError:
            # One namespace is over its quota: what was counted for the others is not stored either.
            for home in counted:
                self._brokers[home].topics.quotas.give_back(by_home[home])
            raise

    async def claim(self, items: Sequence[EnqueueItem], shards: Sequence[int]) -> Duplicates:
        """Claim the keys of items for their shards; returns the duplicates of items on other shards."""
        duplicates = Duplicates()
        firsts: dict[Key, int] = {}
        for place, item in enumerate(items):
            if not item.idempotency_key:
                continue
            key = (item.namespace, item.idempotency_key)
            first = firsts.setdefault(key, place)
            if first != place and shards[first] != shards[place]:
                duplicates.twins[place] = first
        by_home: dict[int, list[Key]] = {}
        for namespace, text in firsts:
            by_home.setdefault(await self._home(namespace), []).append((namespace, text))
        for home, keys in by_home.items():
            await self._claim(home, keys, firsts, shards, duplicates)
        return duplicates

    async def _claim(
        self,
        home: int,
        keys: Sequence[Key],
        firsts: dict[Key, int],
        shards: Sequence[int],
        duplicates: Duplicates,
    ) -> None:
        database = self._brokers[home].database
        owners = await self._registers[home].claim({key: shards[firsts[key]] for key in keys})
        for key, (owner, age) in owners.items():
            place = firsts[key]
            mine = shards[place]
            if owner == mine:
                continue
            found = await self._brokers[owner].database.fetch("topic_key_items", [key[0]], [key[1]])
            if found:
                duplicates.owners[place] = found[0]["item_id"]
            elif age < _ABANDONED_SECONDS or not await database.fetch("take_over_topic_key", *key, owner, mine):
                raise Overloaded(
                    f"the idempotency key {key[1]!r} of namespace {key[0]} is being used on shard {owner};"
                    " try again soon"
                )

    async def _quotas_of(self, namespace: str) -> Quotas:
        return self._brokers[await self._home(namespace)].topics.quotas

    async def _home(self, namespace: str) -> int:
        return await self._directory.find(Name.namespace(namespace))
