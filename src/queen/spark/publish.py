"""Staging and publishing straight in PostgreSQL, with the parts that the server has for it.

This is the one place where Spark meets the broker: what is written by it must be what a push would have written.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

from queen.broker.push.dedup_filter import DedupFilter
from queen.broker.topics.catalog import TopicCatalog
from queen.broker.topics.enqueue import Enqueuer, ItemIds, SeenKeys
from queen.broker.topics.quotas import Quotas
from queen.broker.topics.transaction_ops import TopicTransactionOps
from queen.broker.transactions.stager import Stager
from queen.broker.transactions.stages import Attempt as Attempt
from queen.broker.transactions.stages import Published, Stages
from queen.errors import DatabaseUnavailable
from queen.metrics.meter import Meter
from queen.redis.memory import MemoryKeys
from queen.storage.database import Database
from queen.wire.envelope import Envelope
from queen.wire.ids import IdSource
from queen.wire.push import PushItem

_PATIENCE_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.5
# A batch is published by few statements, however large it is.
_STATEMENT_MS: Final = 600_000
_LOCK_MS: Final = 60_000
_DEDUP_MEMORY: Final = 256 << 20

T = TypeVar("T")


class Shard:
    """One PostgreSQL to write to. Its connections belong to the process and the thread that made it."""

    def __init__(self, dsn: str, *, encryption_keys: Sequence[bytes] = (), dedup_window: float) -> None:
        self._loop = asyncio.new_event_loop()
        self._database = Database(
            dsn,
            pool_size=2,
            connect_timeout=5.0,
            statement_timeout_ms=_STATEMENT_MS,
            lock_timeout_ms=_LOCK_MS,
            application_name="queen spark",
        )
        self.stages = Stages(
            self._database,
            Envelope(encryption_keys),
            IdSource(),
            topic_steps(self._database),
            # Servers read of it in the log of changes.
            lambda fed: None,
            dedup_window=dedup_window,
            seen=DedupFilter(_DEDUP_MEMORY),
        )

    def stager(self, run: str, batch: int, attempt: uuid.UUID) -> ShardStager:
        return ShardStager(self, Stager(self.stages, run, batch, attempt))

    def publish(self, run: str, batch: int, attempts: Sequence[Attempt]) -> Published:
        """Publish a batch; when PostgreSQL goes away, again for a while: it is published once in any case."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self.run(self.stages.publish(run, batch, attempts))
            except DatabaseUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def holds_queue(self, queue: str) -> bool:
        return bool(self.run(self._database.fetch("queue_by_name", queue)))

    def layout(self) -> list[int]:
        """The shards that take new names, if this is one of several."""
        return [shard for row in self.run(self._database.fetch("shard_state")) for shard in row["layout"]]

    def holds_topic(self, topic: tuple[str, str]) -> bool:
        return bool(self.run(self._database.fetch("topics_by_names", [topic[0]], [topic[1]])))

    def abandon(self, run: str, batch: int) -> None:
        self.run(self.stages.abandon(run, batch))

    def close(self) -> None:
        self.run(self._database.close())
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


class ShardStager:
    """Stages what one attempt of a task writes to one shard."""

    def __init__(self, shard: Shard, stager: Stager) -> None:
        self._shard = shard
        self._stager = stager

    def add(self, items: Sequence[PushItem]) -> None:
        self._shard.run(self._stager.add(items))

    def add_topic_items(self, array: bytes, count: int) -> None:
        self._shard.run(self._stager.add_topic_items(array, count))

    def finish(self) -> Attempt:
        return self._shard.run(self._stager.finish())


def topic_steps(database: Database) -> TopicTransactionOps:
    """What stores items of topics."""
    meter = Meter()
    catalog = TopicCatalog(database)
    quotas = Quotas(database, {}, meter)
    keys = SeenKeys(MemoryKeys())
    enqueuer = Enqueuer(database, catalog, ItemIds(database, None), quotas, keys, lambda fed: None, meter)
    return TopicTransactionOps(catalog, enqueuer, quotas)
