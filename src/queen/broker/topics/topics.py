"""The topics of one worker: their parts, wired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import asyncpg

from queen.broker.events import Event, EventKind, named, signal, topic_fed
from queen.broker.topics.admin import TopicAdmin, TopicDeadLetters
from queen.broker.topics.buffer import Buffer
from queen.broker.topics.dequeue import Dequeuer, Heads
from queen.broker.topics.enqueue import Enqueuer, SeenKeys
from queen.broker.topics.flusher import Flusher
from queen.broker.topics.multi_dequeue import MultiTopicDequeuer
from queen.broker.topics.prefetch import LeaseDaemon, PrefetchBuffer, Prefetcher
from queen.broker.topics.settle import LeaseExpiry, Settler
from queen.broker.topics.throttle import TenantThrottle
from queen.broker.topics.transaction_ops import TopicTransactionOps
from queen.broker.topics.write_modes import SYNC, TopicWriter, WriteModes
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.quotas import Quotas
from queen.log.topic_store import ItemIds
from queen.log.topics import TopicCatalog, TopicKey
from queen.metrics.meter import Meter
from queen.redis.interfaces import Counters, ReadyQueue
from queen.redis.link import RedisLink
from queen.redis.memory import MemoryCounters, MemoryKeys, MemoryReadyQueue
from queen.redis.stores import RedisCopies, RedisCounters, RedisKeys, RedisReadyQueue
from queen.settings import Settings
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.wire.ids import IdSource

log = logging.getLogger(__name__)

TOPIC_EVENTS: Final = frozenset(
    {
        EventKind.TOPIC_FED,
        EventKind.TOPIC_CHANGED,
        EventKind.QUOTAS_CHANGED,
        EventKind.TOPIC_MODES_CHANGED,
        EventKind.TOPICS_BUFFERED,
    }
)
# Names hold no control characters, so this cannot be part of one.
_BETWEEN: Final = "\n"
_POLLS_PER_SEARCH: Final = 12


def _prefetches(settings: Settings) -> bool:
    """Whether this worker opens ready queues; it takes part in those of others in any case."""
    # A queue in the memory of one worker is of no use where others serve the same topics.
    return settings.topic_ready_queues == "on" and (bool(settings.redis_addrs) or settings.num_workers == 1)


class Topics:
    """Everything a worker does with topics. Parts are public: routes call the one they need."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        ids: IdSource,
        worker_id: int,
        send: Callable[[Sequence[Event]], None],
        meter: Meter,
        wal: Spool,
        shard: int,
        runtime_dir: Path,
    ) -> None:
        """`send` lets the other workers know; `wal` is the log of this host for buffered namespaces."""
        self._send = send
        self._poll_seconds = settings.pop_safety_poll_ms / 1000
        self.catalog = TopicCatalog(database)
        self.redis = RedisLink(settings) if settings.redis_addrs else None
        shared = RedisCounters(self.redis) if self.redis is not None else None
        self.counters: Counters = shared if shared is not None else MemoryCounters()
        self.quotas = Quotas(database, dict(settings.namespace_quotas), meter, shared)
        self.heads = Heads(database)
        self.lapses = LeaseExpiry(database, self._fed)
        node = settings.mqueue_node_id
        item_ids = ItemIds(database, node + worker_id if node >= 0 else None)
        self._keys = SeenKeys(RedisKeys(self.redis) if self.redis is not None else MemoryKeys())
        self.courtesy = TenantThrottle(runtime_dir, worker_id, settings.num_workers, settings.namespace_courtesy)
        self.enqueuer = Enqueuer(
            database, self.catalog, item_ids, self.quotas, self._keys, self._fed, meter, self.courtesy
        )
        self.desk = self._make_desk(settings, database, ids)
        self._prefetcher = Prefetcher(self.desk, enabled=_prefetches(settings))
        self._lease_daemon = LeaseDaemon(database, self.catalog, self.desk)
        self.dequeuer = Dequeuer(
            database, self.catalog, self.heads, ids, self.lapses.note, meter, self.desk, self._prefetcher, self.courtesy
        )
        self.settler = Settler(database, self.catalog, self._fed, self.lapses.note, meter, self.courtesy)
        self.many = MultiTopicDequeuer(
            database,
            self.catalog,
            self.heads,
            ids,
            self.settler,
            self.lapses.note,
            meter,
            self._poll_seconds,
            self.desk,
            self.courtesy,
        )
        self.dead_letters = TopicDeadLetters(database, self.catalog, self._fed)
        self.admin = TopicAdmin(database, self.catalog, self.desk, self._changed)
        self.steps = TopicTransactionOps(self.catalog, self.enqueuer, self.quotas)
        self.wal = wal
        self.modes = WriteModes(database, dict(settings.namespace_modes))
        copies = RedisCopies(self.redis, shard) if self.redis is not None else None
        self.flusher = Flusher(wal, database, self.catalog, self._fed, copies, keep_seconds=settings.wal_retention)
        self.buffer = Buffer(wal, item_ids, ids, self._buffered, meter, copies, most=settings.max_buffer_length)
        self.writer = TopicWriter(self.modes, self.quotas, self.enqueuer, self.buffer)
        self._background = BackgroundTask()

    async def start(self) -> None:
        if self.redis is not None:
            await self.redis.start()
        self.lapses.start()
        self._lease_daemon.start()
        self.flusher.start()
        self._background.start(self._keep_safe())

    async def stop(self) -> None:
        """Finish what was accepted, and answer those who wait."""
        await self._background.stop()
        await self.lapses.stop()
        await self.enqueuer.lane.join()
        await self._keys.stop()
        await self.buffer.lane.join()
        await self.flusher.stop()
        await self.wal.close()
        await self.settler.stop()
        await self.dequeuer.stop()
        await self.many.stop()
        await self._prefetcher.stop()
        await self._lease_daemon.stop()
        await self.desk.recall_all()
        await self.heads.stop()
        self.courtesy.close()
        if self.redis is not None:
            await self.redis.stop()

    async def set_quota(self, namespace: str, per_minute: int | None) -> None:
        """Set the quota of a namespace here and at every other worker."""
        await self.quotas.set(namespace, per_minute)
        self._send([named(EventKind.QUOTAS_CHANGED, namespace)])

    async def set_mode(self, namespace: str, mode: str | None) -> None:
        """Set the write mode of a namespace here and at every other worker."""
        await self.modes.set(namespace, mode)
        self._send([named(EventKind.TOPIC_MODES_CHANGED, namespace)])
        if self.modes.of(namespace) == SYNC:
            await self.writer.let_pass([namespace])

    async def purge(self, key: TopicKey) -> int:
        """Remove all items of a topic, those too that this host has not stored yet."""
        await self.buffer.pass_on([key[0]])
        return await self.admin.purge(key)

    async def delete(self, key: TopicKey) -> bool:
        """Delete a topic with all that is in it, or is on its way from this host."""
        await self.buffer.pass_on([key[0]])
        return await self.admin.delete(key)

    def handle(self, event: Event) -> None:
        """Take in what another worker did."""
        namespace, _, name = event[5].partition(_BETWEEN)
        if event[0] == EventKind.TOPIC_FED:
            self._awaken((namespace, name), event[4] / 1000)
        elif event[0] == EventKind.TOPIC_CHANGED:
            self.catalog.forget((namespace, name))
        elif event[0] == EventKind.QUOTAS_CHANGED:
            self.quotas.forget()
        elif event[0] == EventKind.TOPIC_MODES_CHANGED:
            self.modes.forget()
        elif event[0] == EventKind.TOPICS_BUFFERED:
            self.flusher.wake()

    def _buffered(self) -> None:
        if self.wal.replays:
            self.flusher.wake()
        else:
            self._send([signal(EventKind.TOPICS_BUFFERED)])

    def _make_desk(self, settings: Settings, database: Database, ids: IdSource) -> PrefetchBuffer:
        queue: ReadyQueue = RedisReadyQueue(self.redis) if self.redis is not None else MemoryReadyQueue()
        return PrefetchBuffer(
            database,
            queue,
            ids,
            shared=self.redis is not None,
            size=settings.topic_ready_items,
            on_freed=lambda topic: self._fed([(topic.key, 0.0)]),
        )

    def _fed(self, topics: Sequence[tuple[TopicKey, float]]) -> None:
        for key, seconds in topics:
            self._awaken(key, seconds)
        self._send([topic_fed(_BETWEEN.join(key), seconds) for key, seconds in topics])

    def _awaken(self, key: TopicKey, seconds: float) -> None:
        self.dequeuer.fed(key, seconds)
        self.many.fed(key, seconds)

    def _changed(self, key: TopicKey) -> None:
        self.catalog.forget(key)
        self._send([named(EventKind.TOPIC_CHANGED, _BETWEEN.join(key))])

    async def _keep_safe(self) -> None:
        """Now and then look for what no other worker of this host told of."""
        polls = 0
        while True:
            await asyncio.sleep(self._poll_seconds)
            polls += 1
            try:
                await self.lapses.look(everywhere=polls % _POLLS_PER_SEARCH == 0)
                await self.catalog.refresh()
                await self.quotas.refresh()
                await self.modes.refresh()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("the slow poll of topics failed; the next tries again: %s", error)
                continue
            self.dequeuer.wake_all()
            self.many.wake_all()
