"""Administration of queues: making them and setting their options, deleting and clearing them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from queen.broker.catalog import Catalog, Queue
from queen.broker.events import Event, EventKind, named, partition_changed
from queen.errors import BadRequest, NotFound
from queen.metrics.meter import Meter
from queen.storage.database import Database
from queen.wire.ids import partition_uuid
from queen.wire.push import DEFAULT_PARTITION

OptionValue: TypeAlias = int | bool | None

_LARGEST_INT = 2**31 - 1
_LARGEST_BIGINT = 2**63 - 1
_LONGEST_SHOWN = 80
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,30}\s*", re.ASCII)
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `default` is what is stored when it is not sent; `shown` what is echoed in place of null."""

    name: str
    column: str
    default: OptionValue
    unit: str = ""
    largest: int = _LARGEST_INT
    shown: OptionValue = None

    @property
    def expected(self) -> str:
        if isinstance(self.default, bool):
            return "true or false"
        return f"a whole number{self.unit and f' of {self.unit}'} from 0 to {self.largest}"

    def read(self, value: object) -> OptionValue:
        """The value to store; a number may come as text, null stands for the default."""
        if value is None:
            return self.default
        found = _flag(value) if isinstance(self.default, bool) else _whole(value)
        if found is None or not 0 <= found <= self.largest:
            raise BadRequest(
                f"option {self.name} must be {self.expected}, not {_shown(value)} (at options.{self.name})"
            )
        return found

    def echo(self, queue: Queue) -> OptionValue:
        stored: OptionValue = getattr(queue, self.column)
        return self.shown if stored is None else stored


# In the order in which they are echoed, which is also that of the parameters of `configure_queue`.
OPTIONS: tuple[Option, ...] = (
    Option("priority", "priority", 0),
    Option("leaseTime", "lease_time", 300, "seconds"),
    Option("retryLimit", "retry_limit", 3),
    Option("retryDelay", "retry_delay", 1000, "milliseconds"),
    Option("maxSize", "max_size", 0, "messages", largest=_LARGEST_BIGINT),
    # Messages expire only where somebody asked for it, though clients are told the default they know.
    Option("ttl", "ttl", None, "seconds", shown=3600),
    Option("deadLetterQueue", "dead_letter_queue", False),
    Option("dlqAfterMaxRetries", "dlq_after_max_retries", False),
    Option("delayedProcessing", "delayed_processing", 0, "seconds"),
    Option("windowBuffer", "window_buffer", 0, "seconds"),
    Option("retentionSeconds", "retention_seconds", 0, "seconds"),
    Option("completedRetentionSeconds", "completed_retention_seconds", 0, "seconds"),
    Option("retentionEnabled", "retention_enabled", False),
    Option("encryptionEnabled", "encryption_enabled", False),
    Option("maxWaitTimeSeconds", "max_wait_time_seconds", 0, "seconds"),
    Option("dedupWindowSeconds", "dedup_window_seconds", None, "seconds"),
)


def read_options(sent: object) -> list[OptionValue]:
    """What to store for each of `OPTIONS`; unknown options are ignored. Raises `BadRequest` for the first bad one."""
    if sent is None:
        sent = {}
    if not isinstance(sent, Mapping):
        raise BadRequest(f"options must be an object, not {_shown(sent)} (at options)")
    return [option.read(sent.get(option.name)) for option in OPTIONS]


def echo_options(queue: Queue) -> dict[str, OptionValue]:
    """The options of a queue as clients are told them."""
    return {option.name: option.echo(queue) for option in OPTIONS}


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    return None


def _flag(value: object) -> bool | None:
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


Publish: TypeAlias = Callable[[Sequence[Event]], None]
"""Lets this and every other worker know."""

_STEP: Final = 5000
_PARTITIONS_AT_ONCE: Final = 1000
_SWEEP_SECONDS: Final = 2.0
_SWEEPS: Final = ("sweep_cursors", "sweep_dead_letters", "sweep_traces")


@dataclass(frozen=True, slots=True)
class Configured:
    """A queue as it is stored now, and the public id of its default partition."""

    queue: Queue
    partition_id: str


class Queues:
    """Changes queues as a whole, and has every worker know of it."""

    def __init__(self, database: Database, catalog: Catalog, publish: Publish, meter: Meter) -> None:
        self._database = database
        self._catalog = catalog
        self._publish = publish
        self._meter = meter

    async def configure(self, name: str, namespace: str, task: str, options: Sequence[OptionValue]) -> Configured:
        """Make a queue, or replace everything that is set of it; `options` as `read_options` gives them."""
        async with self._database.transaction() as transaction:
            (record,) = await transaction.fetch("configure_queue", name, namespace, task, *options)
            queue = Queue.from_record(record)
            made = await transaction.fetch("create_partitions", [queue.id], [DEFAULT_PARTITION])
            (partition,) = await transaction.fetch("partitions_by_names", [queue.id], [DEFAULT_PARTITION])
        self._meter.partitions_made(name, len(made))
        # What is told to oneself does not make the catalog read again, because who makes a queue knows it already.
        self._catalog.refresh_queue(name)
        self._publish([named(EventKind.QUEUE_CHANGED, name)])
        return Configured(queue, partition_uuid(self._catalog.shard, partition["id"]))

    async def delete(self, name: str) -> bool:
        """Delete a queue with all that is in it, however much that is; False when there is none of that name.

        It is gone at once. Its cursors, dead letters and traces are removed for a while here; what is left of them, and
        the messages, is removed by whoever works off `dropped_partitions`. Subscriptions stay for a queue of that name.
        """
        async with self._database.transaction() as transaction:
            held = await transaction.fetch("hold_queue", name)
            if held:
                dropped = await transaction.fetch("drop_queue_partitions", held[0]["id"])
                await transaction.fetch("drop_queue", held[0]["id"])
        # Also when it is not there: somebody may still believe it is.
        self._publish([named(EventKind.QUEUE_GONE, name)])
        if held:
            self._meter.partitions_removed(name, len(dropped))
            await self._sweep([row["partition_id"] for row in dropped])
        return bool(held)

    async def clear(self, name: str, partition_name: str | None = None) -> int:
        """Remove all messages stored so far from a queue, or from one of its partitions; returns how many that were.

        Nobody gets them any more from the moment on at which this is committed. Options, cursors and dead letters stay.
        """
        queue = await self._queue(name)
        rows = await self._database.fetch("clear_partitions", queue.id, partition_name)
        if not rows and partition_name is not None:
            raise NotFound("Partition not found")
        ids: list[int] = sorted(row["id"] for row in rows if row["messages"])
        for start in range(0, len(ids), _PARTITIONS_AT_ONCE):
            some = ids[start : start + _PARTITIONS_AT_ONCE]
            await self._remove_cleared(some)
            self._publish([partition_changed(queue.id, id) for id in some])
        return sum(row["messages"] for row in rows)

    async def _queue(self, name: str) -> Queue:
        """The queue as PostgreSQL has it, since the catalog may remember one that is gone."""
        for record in await self._database.fetch("queue_by_name", name):
            return Queue.from_record(record)
        raise NotFound("Queue not found")

    async def _sweep(self, partition_ids: Sequence[int]) -> None:
        """Remove in steps what hung on partitions that are gone, until it is done or takes too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SWEEP_SECONDS
        for start in range(0, len(partition_ids), _PARTITIONS_AT_ONCE):
            some = list(partition_ids[start : start + _PARTITIONS_AT_ONCE])
            for statement in _SWEEPS:
                while len(await self._database.fetch(statement, some, _STEP)) == _STEP:
                    if loop.time() > deadline:
                        return

    async def _remove_cleared(self, partition_ids: list[int]) -> None:
        """Remove what is out of reach in steps, so that no statement takes long."""
        place = (0, -1)
        while rows := await self._database.fetch("remove_cleared_segments", partition_ids, *place, _STEP):
            place = (rows[0]["partition_id"], rows[0]["base_offset"])
        await self._database.fetch("remove_cleared_traces", partition_ids)
