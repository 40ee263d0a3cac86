"""The context of handlers: one shard, or the worker as a whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from queen.broker.broker import Broker
from queen.broker.inspect.groups import Groups
from queen.broker.inspect.log_reader import LogReader
from queen.broker.inspect.resources import Resources
from queen.broker.inspect.seeks import Seeks
from queen.broker.maintenance.database_copy import DatabaseCopy
from queen.broker.queues import Queues
from queen.http.consume.consumers import Consumers
from queen.http.server.message import Route
from queen.monitoring.history import History
from queen.monitoring.live import LiveFeed
from queen.monitoring.recorder import Recorder
from queen.monitoring.scrape import Scraper
from queen.monitoring.status import Status
from queen.settings import Settings
from queen.wire.api.resources.groups import GroupSummary, LaggingPartition

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from queen.broker.sharding.moves import ShardMoves
    from queen.broker.sharding.sharded_broker import ShardedBroker

MetricSource: TypeAlias = "Callable[[], Iterable[Metric]]"
"""Gives metric families that something else keeps, such as the spool or the peers."""


GroupSummaries: TypeAlias = "Callable[[], Awaitable[list[GroupSummary]]]"
"""Gives all groups of a shard, by name; requests that come at the same time, or soon after, share the work."""


Furthest: TypeAlias = "Callable[[], Awaitable[list[LaggingPartition]]]"
"""Gives the partitions of a shard on which groups are furthest behind, shared likewise."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its broker, and the views over its database."""

    broker: Broker
    queues: Queues
    resources: Resources
    groups: Groups
    group_summaries: GroupSummaries
    furthest: Furthest
    seeks: Seeks
    log_reader: LogReader
    status: Status
    history: History


@dataclass(slots=True)
class Api:
    """The worker: its broker (of one shard or of all of them), settings and statistics."""

    settings: Settings
    broker: Broker | ShardedBroker
    brokers: Sequence[Broker]
    """The brokers of all shards, in the order of their numbers."""
    recorder: Recorder
    scraper: Scraper
    metric_sources: Sequence[MetricSource]
    consumers: Consumers
    live: LiveFeed
    database_copy: DatabaseCopy
    """Copies the first shard, where there is no other."""
    key_problem: Callable[[], str] = lambda: ""
    """Why good tokens may be refused; empty when they are not."""
    keep_bodies: bool = False
    """Whether something reads the body of a push after it has been answered."""
    routes: Sequence[Route] = field(default_factory=list)
    stopping: bool = False
    moves: ShardMoves | None = None
    """Where there are several shards."""
