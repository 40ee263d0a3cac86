"""The topics of one worker: the components, composed. What is off is not imported."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncpg

from queen.broker.answer_size import Answers
from queen.broker.events import Event, EventKind, named, signal, topic_due
from queen.broker.topics.admin import TopicAdmin, TopicDeadLetters
from queen.broker.topics.batching import FairShare
from queen.broker.topics.buffered import SYNC, SendOn, TopicBuffer, TopicRecords, TopicWriter, WriteModes
from queen.broker.topics.context import TopicContext
from queen.broker.topics.dequeue import Dequeuer, Heads
from queen.broker.topics.enqueue import Enqueuer, SeenKeys
from queen.broker.topics.multi_dequeue import MultiTopicDequeuer
from queen.broker.topics.settle import LeaseExpiry, Settler
from queen.broker.topics.transaction_ops import TopicTransactionOps
from queen.concurrency import BackgroundTask
from queen.errors import QueenError
from queen.log.quotas import Quotas
from queen.log.topic_store import ItemIds
from queen.log.topics import TopicCatalog, TopicKey
from queen.metrics.meter import Meter
from queen.redis.interfaces import Counters, Keys
from queen.redis.memory import MemoryCounters, MemoryKeys
from queen.settings import Settings
from queen.spool.drainer import Drainer
from queen.spool.record import Record
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.wire.ids import IdSource

if TYPE_CHECKING:
    from queen.broker.topics.log_copies import LogRecovery
    from queen.broker.topics.prefetch import PrefetchBuffers
    from queen.broker.topics.prefetching import LeaseDaemon
    from queen.broker.topics.throttle import TenantThrottle
    from queen.redis.link import RedisLink

log = logging.getLogger(__name__)

TOPIC_EVENTS: Final = frozenset(
    {
        EventKind.TOPIC_DUE,
        EventKind.TOPIC_CHANGED,
        EventKind.QUOTAS_CHANGED,
        EventKind.TOPIC_MODES_CHANGED,
        EventKind.TOPICS_BUFFERED,
    }
)
NAME_SEPARATOR: Final = "\n"
"""Between the namespace and the topic of an event: names hold no control characters."""
_POLLS_PER_FULL_SEARCH: Final = 12
# Of the drainer of buffered items.
_POLL_SECONDS: Final = 0.1
_BATCH_RECORDS: Final = 100
_RETRY_SECONDS: Final = 300.0
_OPEN_SECONDS: Final = 10.0
_FLUSH_SECONDS: Final = 5.0


class Topics:
    """The components of a worker's topics. They are public: routes call the one they need."""

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
        answers: Answers,
    ) -> None:
        """`send` notifies the other workers; `wal` is the log of this host for buffered namespaces."""
        self._database = database
        self._send = send
        self._poll_seconds = settings.pop_safety_poll_ms / 1000
        self._background = BackgroundTask()
        self.on_change: Callable[[Event], None] = lambda event: None
        """Called when this worker has changed a topic or the quota of a namespace."""
        self.redis = _redis_link(settings)
        self.throttle = _throttle(settings, runtime_dir, worker_id)
        self.counters: Counters = MemoryCounters()
        keys: Keys = MemoryKeys()
        if self.redis is not None:
            from queen.redis.stores import RedisCounters, RedisKeys

            self.counters, keys = RedisCounters(self.redis), RedisKeys(self.redis)
        self._keys = SeenKeys(keys)
        self.catalog = TopicCatalog(database)
        shared = self.counters if self.redis is not None else None
        self.quotas = Quotas(database, dict(settings.namespace_quotas), meter, shared)
        node = settings.mqueue_node_id
        self._item_ids = ItemIds(database, node + worker_id if node >= 0 else None)
        fair_share = self.throttle.fair_share if self.throttle is not None else FairShare
        self.enqueuer = Enqueuer(
            database, self.catalog, self._item_ids, self.quotas, self._keys, self._items_due, meter, fair_share
        )
        self.transaction_ops = TopicTransactionOps(self.catalog, self.enqueuer, self.quotas)
        self._answers = answers
        self.dead_letters = TopicDeadLetters(database, self.catalog, self._items_due, self._answers)
        self.heads = Heads(database)
        self._compose(
            settings,
            TopicContext(
                database, self.catalog, ids, meter, self._items_due, self._leased, fair_share, settings.answer_bytes
            ),
        )
        self.wal = wal
        self.modes = WriteModes(database, dict(settings.namespace_modes))
        self.buffer = TopicBuffer(wal, self._item_ids, ids, self._buffered, meter, most=settings.max_buffer_length)
        self.writer = TopicWriter(self.modes, self.quotas, self.enqueuer, self.buffer)
        self._records = self._topic_records()
        self._forwarded_records = self._topic_records()
        self._taking_over = asyncio.Lock()
        self.drainer = Drainer(
            wal,
            database,
            self._records,
            name="log of buffered topic items",
            poll_seconds=_POLL_SECONDS,
            batch_records=_BATCH_RECORDS,
            retry_seconds=_RETRY_SECONDS,
            open_seconds=_OPEN_SECONDS,
            flush_seconds=_FLUSH_SECONDS,
            keep_seconds=settings.wal_retention,
            retire=self.redis is not None,
        )
        self._recovery = self._copy_log(self.redis, shard) if self.redis is not None else None

    def _compose(self, settings: Settings, context: TopicContext) -> None:
        """The parts that lease items: with prefetch buffers, or without."""
        self.prefetch: PrefetchBuffers | None = None
        self._lease_daemon: LeaseDaemon | None = None
        database, catalog = context.database, context.catalog
        if not _prefetches(settings):
            self.expiry = LeaseExpiry(database, self._items_due)
            self.settler = Settler(context)
            self.dequeuer = Dequeuer(context, self.heads)
            self.multi_dequeuer = MultiTopicDequeuer(context, self.heads, self.settler, self._poll_seconds)
            self.admin = TopicAdmin(database, catalog, self._changed, self._answers)
            return
        from queen.broker.topics import prefetch, prefetching

        buffers = self.prefetch = prefetch.PrefetchBuffers(
            database,
            prefetch.ready_queue(self.redis),
            context.ids,
            shared=self.redis is not None,
            size=settings.topic_ready_items,
            most_bytes=context.most_bytes,
            on_freed=lambda topic: self._items_due([(topic.key, 0.0)]),
        )
        self._lease_daemon = prefetching.LeaseDaemon(database, catalog, buffers)
        self.expiry = prefetching.PrefetchingExpiry(database, self._items_due)
        self.settler = prefetching.PrefetchingSettler(context, buffers)
        self.dequeuer = prefetching.PrefetchingDequeuer(context, self.heads, buffers)
        self.multi_dequeuer = prefetching.PrefetchingMultiDequeuer(
            context, self.heads, self.settler, self._poll_seconds, buffers
        )
        self.admin = prefetching.PrefetchingAdmin(database, catalog, self._changed, buffers, self._answers)

    def _copy_log(self, redis: RedisLink, shard: int) -> LogRecovery:
        """Copy the log of buffered items to Redis, and recover those of other hosts from there."""
        from queen.broker.topics.log_copies import LogCopies, LogRecovery
        from queen.redis.stores import RedisCopies

        stored = RedisCopies(redis, shard)
        copies = LogCopies(stored)
        self.buffer.copy = copies.add
        self.drainer.on_stored = copies.trim
        availability = self._database.availability
        return LogRecovery(self.wal, stored, self.drainer.positions, self._topic_records(), availability)

    def _topic_records(self) -> TopicRecords:
        return TopicRecords(self._database, self.catalog, self.wal.failed, self._items_due)

    async def start(self) -> None:
        if self.redis is not None:
            await self.redis.start()
        self.expiry.start()
        if self._lease_daemon is not None:
            self._lease_daemon.start()
        await self._prepare()
        self.drainer.start()
        if self._recovery is not None:
            self._recovery.start()
        self._background.start(self._poll())

    async def stop(self) -> None:
        """Finish what was accepted, and answer waiting requests."""
        await self._background.stop()
        await self.expiry.stop()
        await self.enqueuer.batcher.join()
        await self._keys.stop()
        await self.buffer.batcher.join()
        if self._recovery is not None:
            await self._recovery.stop()
        await self.drainer.stop()
        await self.wal.close()
        await self.settler.stop()
        await self.dequeuer.stop()
        await self.multi_dequeuer.stop()
        if self._lease_daemon is not None:
            await self._lease_daemon.stop()
        if self.prefetch is not None:
            await self.prefetch.recall_all()
        await self.heads.stop()
        if self.throttle is not None:
            self.throttle.close()
        if self.redis is not None:
            await self.redis.stop()

    async def set_quota(self, namespace: str, per_minute: int | None) -> None:
        """Set the quota of a namespace here and at every other worker."""
        await self.quotas.set(namespace, per_minute)
        self._publish(named(EventKind.QUOTAS_CHANGED, namespace))

    async def set_mode(self, namespace: str, mode: str | None) -> None:
        """Set the write mode of a namespace here and at every other worker."""
        await self.modes.set(namespace, mode)
        self._send([named(EventKind.TOPIC_MODES_CHANGED, namespace)])
        if self.modes.of(namespace) == SYNC:
            await self.writer.await_drained([namespace])
        else:
            await self._item_ids.reserve()

    async def purge(self, key: TopicKey, *, leased: bool = True) -> int:
        """Remove all items of a topic, also those that this host has not stored yet."""
        await self.buffer.await_drained([key[0]])
        return await self.admin.purge(key, leased=leased)

    async def delete(self, key: TopicKey) -> bool:
        """Delete a topic with everything in it, also what this host has not stored yet."""
        await self.buffer.await_drained([key[0]])
        return await self.admin.delete(key)

    def forward_to(self, send_on: SendOn) -> None:
        """With several shards: `send_on` stores buffered items whose topic has moved to another shard."""
        self._records.send_on = self._forwarded_records.send_on = send_on

    async def take_over(self, record: Record) -> None:
        """Store an item from the log of another shard, once, however often it is sent."""
        async with self._taking_over:
            await self._forwarded_records.store_once(record)
        await self._database.fetch("spool_retire", [uuid.UUID(bytes=record.block)])

    def handle(self, event: Event) -> None:
        """Apply a notification of another worker."""
        namespace, _, name = event[5].partition(NAME_SEPARATOR)
        if event[0] == EventKind.TOPIC_DUE:
            self._wake((namespace, name), event[4] / 1000)
        elif event[0] == EventKind.TOPIC_CHANGED:
            self.catalog.forget((namespace, name))
            # It may have been resumed.
            self._wake((namespace, name), 0.0)
        elif event[0] == EventKind.QUOTAS_CHANGED:
            self.quotas.forget()
        elif event[0] == EventKind.TOPIC_MODES_CHANGED:
            self.modes.forget()
        elif event[0] == EventKind.TOPICS_BUFFERED:
            self.drainer.wake()

    def _buffered(self) -> None:
        if self.wal.replays:
            self.drainer.wake()
        else:
            self._send([signal(EventKind.TOPICS_BUFFERED)])

    def _leased(self, seconds: float) -> None:
        self.expiry.note(seconds)

    def _items_due(self, topics: Sequence[tuple[TopicKey, float]]) -> None:
        for key, seconds in topics:
            self._wake(key, seconds)
        self._send([topic_due(NAME_SEPARATOR.join(key), seconds) for key, seconds in topics])

    def _wake(self, key: TopicKey, seconds: float) -> None:
        self.dequeuer.items_due(key, seconds)
        self.multi_dequeuer.items_due(key, seconds)

    def _changed(self, key: TopicKey) -> None:
        self.catalog.forget(key)
        self._wake(key, 0.0)
        self._publish(named(EventKind.TOPIC_CHANGED, NAME_SEPARATOR.join(key)))

    def _publish(self, event: Event) -> None:
        self.on_change(event)
        self._send([event])

    async def _prepare(self) -> None:
        """Load what a buffered enqueue needs, should PostgreSQL become unavailable before the first one."""
        try:
            await self.quotas.refresh()
            await self.modes.refresh()
            if self.modes.buffered:
                await self._item_ids.reserve()
        except (QueenError, asyncpg.PostgresError) as error:
            log.debug("quotas and write modes not loaded at start: %s", error)

    async def _poll(self) -> None:
        """Find changes without a notification, as after a crash of another worker or by a host that is no peer."""
        polls = 0
        while True:
            await asyncio.sleep(self._poll_seconds)
            polls += 1
            try:
                await self.expiry.search(everywhere=polls % _POLLS_PER_FULL_SEARCH == 0)
                await self.catalog.refresh()
                await self.quotas.refresh()
                await self.modes.refresh()
                if self.modes.buffered:
                    await self._item_ids.reserve()
            except (QueenError, asyncpg.PostgresError) as error:
                log.debug("safety poll of topics failed: %s", error)
                continue
            self.dequeuer.wake_all()
            self.multi_dequeuer.wake_all()


def _prefetches(settings: Settings) -> bool:
    # A buffer in the memory of one worker is of no use where others serve the same topics.
    return settings.topic_ready_queues == "on" and (bool(settings.redis_addrs) or settings.num_workers == 1)


def _redis_link(settings: Settings) -> RedisLink | None:
    if not settings.redis_addrs:
        return None
    from queen.redis.link import RedisLink

    return RedisLink(settings)


def _throttle(settings: Settings, runtime_dir: Path, worker_id: int) -> TenantThrottle | None:
    if not settings.namespace_courtesy:
        return None
    from queen.broker.topics.throttle import TenantThrottle

    return TenantThrottle(runtime_dir, worker_id, settings.num_workers, settings.namespace_courtesy)
