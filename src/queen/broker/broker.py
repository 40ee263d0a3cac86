"""The broker of one worker on one shard: its components, and the order in which they start and stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from queen.broker.ack.acker import Acker
from queen.broker.ack.dead_letters import DeadLetters
from queen.broker.ack.leases import Releaser, Renewer
from queen.broker.change_log import ChangeReader
from queen.broker.events import Event, EventKind, pushed, rescan, signal
from queen.broker.heartbeat import DatabaseHeartbeat, DatabaseProbe, MaintenanceModes, Mode
from queen.broker.inspect.browse import MessageBrowser
from queen.broker.inspect.bulk import BulkMessages
from queen.broker.inspect.messages import Messages
from queen.broker.inspect.search import MessageSearch
from queen.broker.inspect.traces import Traces
from queen.broker.maintenance.jobs import JobRunner
from queen.broker.notifications import Notifications
from queen.broker.pop.claims import Claimer
from queen.broker.pop.namespace_pop import NamespacePops
from queen.broker.pop.popper import Popper
from queen.broker.push.append_lock import AppendLock
from queen.broker.push.pusher import Pusher
from queen.broker.push.replay import SpoolDrainer
from queen.broker.state.ephemeral import Ephemeral
from queen.broker.state.key_values import KeyValues
from queen.broker.state.locks import Locks
from queen.broker.state.timers import Timers
from queen.broker.topics.topics import Topics
from queen.broker.transactions.inbox import InboxDrainer
from queen.broker.transactions.stream_cycles import StreamCycles
from queen.broker.transactions.stream_queries import StreamQueries
from queen.broker.transactions.timer_firing import TimerFiring
from queen.broker.transactions.transactions import Transactions
from queen.bus.peers import Peers
from queen.log.catalog import Catalog
from queen.log.dedup import Dedup
from queen.log.segments import SegmentCache
from queen.log.stages import Stages
from queen.metrics.meter import Meter
from queen.settings import Settings
from queen.spool.spool import Spool
from queen.storage.database import Database
from queen.wire.envelope import Envelope


@dataclass(slots=True, eq=False, kw_only=True)
class Broker:
    """The components of a worker for the queues of one shard. They are public: routes call the one they need."""

    settings: Settings
    worker_id: int
    meter: Meter
    database: Database
    database_probe: DatabaseProbe
    heartbeat: DatabaseHeartbeat
    modes: MaintenanceModes
    envelope: Envelope
    catalog: Catalog
    cache: SegmentCache
    notifications: Notifications
    peers: Peers
    changes: ChangeReader
    dedup: Dedup
    append_lock: AppendLock
    pusher: Pusher
    spool: Spool
    replayer: SpoolDrainer
    claimer: Claimer
    popper: Popper
    namespace_pops: NamespacePops
    acker: Acker
    renewer: Renewer
    releaser: Releaser
    dead_letters: DeadLetters
    topics: Topics
    key_values: KeyValues
    locks: Locks
    timers: Timers
    ephemeral: Ephemeral
    timer_firing: TimerFiring
    transactions: Transactions
    stages: Stages
    inbox: InboxDrainer
    stream_queries: StreamQueries
    stream_cycles: StreamCycles
    message_browser: MessageBrowser
    message_search: MessageSearch
    bulk_messages: BulkMessages
    messages: Messages
    traces: Traces
    jobs: JobRunner
    siblings: Sequence[Broker] = ()
    """The brokers of all shards in the order of their numbers, where there are several."""

    async def start(self) -> None:
        self.notifications.bus.start()
        await self.heartbeat.start()
        self.replayer.start()
        self.popper.start()
        await self.topics.start()
        self.changes.start()
        self.peers.start()
        self.jobs.start()
        self.timer_firing.start()
        if self.settings.queen_sql_push:
            self.inbox.start()

    async def stop(self) -> None:
        """Finish what was accepted, answer parked pops, and close."""
        await self.timer_firing.stop()
        await self.inbox.stop()
        await self.jobs.stop()
        await self.changes.stop()
        self.ephemeral.stop()
        await self.popper.stop()
        await self.topics.stop()
        await self.pusher.join()
        for batcher in (self.acker.batcher, self.renewer.batcher, self.releaser.batcher):
            await batcher.join()
        await self.peers.stop()
        await self.replayer.stop()
        await self.heartbeat.stop()
        await self.spool.close()
        self.notifications.bus.close()
        self.append_lock.close()
        await self.database_probe.stop()
        await self.database.close()

    def publish(self, events: Sequence[Event]) -> None:
        """Handle events here, and send them to every other worker."""
        self.notifications.publish(events)

    async def notify(self, queue_name: str, partition_name: str | None) -> None:
        """Have every pop look for messages of a queue, or of one partition of it."""
        queue = await self.catalog.queue(queue_name)
        if queue is None:
            return
        partition = await self.catalog.partition(queue, partition_name) if partition_name else None
        self.publish([rescan(queue.id) if partition is None else pushed(queue.id, partition.id, 1)])

    async def switch(self, mode: Mode, enabled: bool) -> None:
        """Switch a maintenance mode on or off, for every worker of every host."""
        await self.heartbeat.switch(mode, enabled)
        self.notifications.send([signal(EventKind.MODES_CHANGED)])
