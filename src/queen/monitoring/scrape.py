"""Collects what a scrape of metrics shows."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

from queen.broker.inspect.queue_stats import QueueStats
from queen.errors import QueenError
from queen.metrics.counters import WorkerTally
from queen.metrics.report import Report
from queen.monitoring.history import History
from queen.monitoring.recorder import Recorder
from queen.single_flight import SharedResult
from queen.storage.database import Database, Record

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 5.0
_GROUPS_PER_QUEUE: Final = 10


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a group on a queue."""

    queue: str
    group: str
    messages: int


@dataclass(frozen=True, slots=True)
class Inbox:
    """What was pushed by SQL: rows that wait to be appended, since when, and what became of the others."""

    rows: int = 0
    oldest_seconds: float = 0.0
    appended: int = 0
    duplicates: int = 0
    dead_letters: int = 0
    refused: int = 0

    def __add__(self, other: Inbox) -> Inbox:
        return Inbox(
            self.rows + other.rows,
            max(self.oldest_seconds, other.oldest_seconds),
            self.appended + other.appended,
            self.duplicates + other.duplicates,
            self.dead_letters + other.dead_letters,
            self.refused + other.refused,
        )


@dataclass(frozen=True, slots=True)
class TimerStats:
    """How many timers wait, how many of them are due, and for how long the oldest of these has been."""

    pending: int = 0
    due: int = 0
    lag_seconds: float = 0.0

    def __add__(self, other: TimerStats) -> TimerStats:
        lag = max(self.lag_seconds, other.lag_seconds)
        return TimerStats(self.pending + other.pending, self.due + other.due, lag)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Metrics of all hosts, from PostgreSQL. `queues` are those with the most pending messages, up to the limit."""

    lifetime: WorkerTally
    workers: Sequence[Mapping[str, Any]]
    """The last flush of each worker."""
    rates: Mapping[str, Mapping[str, Any]]
    """Per-minute rates of each queue, as of the last flushes."""
    queues: Sequence[str]
    queues_left_out: int
    pending: Mapping[str, int]
    lags: Sequence[Lag]
    lags_left_out: int
    dead_letters: Mapping[str, int]
    paused: Sequence[str]
    paused_groups: Sequence[tuple[str, str]]
    """(queue, group)"""
    paused_topics: Sequence[tuple[str, str]]
    """(namespace, topic)"""
    inbox: Inbox
    timers: TimerStats


@dataclass(frozen=True, slots=True)
class Scrape:
    """The workers of this host, and the cluster (None while PostgreSQL is unavailable)."""

    reports: Sequence[Report]
    cluster: Cluster | None = field(default=None)


class Scraper:
    """Collects the metrics of one shard."""

    def __init__(
        self,
        database: Database,
        lags: SharedResult[Sequence[Record]],
        history: History,
        recorder: Recorder,
        queue_stats: QueueStats,
        most_queues: int,
    ) -> None:
        self._database = database
        self._queue_stats = queue_stats
        self._lags = lags
        self._history = history
        self._recorder = recorder
        self._most_queues = most_queues

    async def scrape(self) -> Scrape:
        """Collect now. Without PostgreSQL there are the workers of this host alone."""
        reports = await self._recorder.published_reports()
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                return Scrape(reports, await self._cluster(reports))
        except (TimeoutError, QueenError, asyncpg.PostgresError) as error:
            log.warning("metrics scrape: cluster metrics are missing, PostgreSQL is unavailable: %s", error)
            return Scrape(reports)

    async def _cluster(self, reports: Sequence[Report]) -> Cluster:
        queue_stats = await self._queue_stats()
        ranked = sorted(queue_stats, key=lambda row: (-row["pending"], -row["pushed"], row["name"]))
        chosen = {row["name"] for row in ranked[: self._most_queues]}
        lags = [
            Lag(row["queue_name"], row["group_name"], row["behind"])
            for row in await self._lags.get()
            if row["queue_name"] in chosen
        ]
        lags.sort(key=lambda lag: (-lag.messages, lag.queue, lag.group))
        most = _GROUPS_PER_QUEUE * self._most_queues
        letters = await self._database.fetch("dead_letter_counts")
        paused = await self._database.fetch("paused_queues")
        topics = await self._database.fetch("topic_paused_names")
        workers = [dict(row) for row in await self._database.fetch("last_flushes", self._recorder.gone_after)]
        rates = await self._database.fetch("last_queue_flushes", self._recorder.gone_after)
        flushed = {str(row["life"]) for row in workers}
        fresh = [report for report in reports if report.life not in flushed]
        return Cluster(
            lifetime=await self._history.lifetime(),
            workers=[*workers, *({**report.worker_rows()[-1], "age": 0.0} for report in fresh)],
            rates=_with_fresh({row["queue_name"]: dict(row) for row in rates}, fresh),
            queues=sorted(chosen),
            queues_left_out=len(queue_stats) - len(chosen),
            pending={row["name"]: row["pending"] for row in queue_stats},
            lags=lags[:most],
            lags_left_out=max(0, len(lags) - most),
            dead_letters={row["name"]: row["messages"] for row in letters},
            paused=[row["name"] for row in paused if row["paused"]],
            paused_groups=[(row["name"], group) for row in paused for group in sorted(row["paused_groups"])],
            paused_topics=[(row["namespace"], row["name"]) for row in topics],
            inbox=await self._inbox(),
            timers=TimerStats(*(await self._database.fetch("timer_stats"))[0]),
        )

    async def _inbox(self) -> Inbox:
        (row,) = await self._database.fetch("inbox_stats")
        return Inbox(*row)


def _with_fresh(rates: dict[str, dict[str, Any]], fresh: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """Add the counters of workers that have not flushed yet, so that a new server does not look idle."""
    per_minute = (
        "push_requests",
        "push_messages",
        "pop_messages",
        "pop_empty",
        "ack_success",
        "ack_failed",
        "transactions",
    )
    for report in fresh:
        for row in report.queue_rows():
            known = rates.setdefault(
                row["queue_name"],
                dict.fromkeys((*per_minute, "lag_ms", "popped", "lag_max_ms", "parked", "age"), 0.0),
            )
            for key in per_minute:
                known[key] += row[key] * 60 / row["seconds"]
            known["lag_ms"] += row["lag_ms"]
            known["popped"] += row["pop_messages"]
            known["lag_max_ms"] = max(known["lag_max_ms"], row["lag_max_ms"])
            known["parked"] += row["parked"]
    return rates


class ShardsScraper(Scraper):
    """Collects the metrics of all shards: history is on shard 0, queues on each."""

    def __init__(self, first: Scraper, others: Sequence[Scraper]) -> None:
        super().__init__(
            first._database, first._lags, first._history, first._recorder, first._queue_stats, first._most_queues
        )
        self._others = others

    async def _cluster(self, reports: Sequence[Report]) -> Cluster:
        whole = await super()._cluster(reports)
        for other in self._others:
            try:
                part = await other._cluster(reports)
            except (QueenError, asyncpg.PostgresError) as error:
                log.warning("metrics scrape: a shard is missing: %s", error)
                continue
            whole = dataclasses.replace(
                whole,
                queues=sorted({*whole.queues, *part.queues}),
                queues_left_out=whole.queues_left_out + part.queues_left_out,
                pending={**whole.pending, **part.pending},
                lags=[*whole.lags, *part.lags],
                lags_left_out=whole.lags_left_out + part.lags_left_out,
                dead_letters={**whole.dead_letters, **part.dead_letters},
                paused=[*whole.paused, *part.paused],
                paused_groups=[*whole.paused_groups, *part.paused_groups],
                paused_topics=[*whole.paused_topics, *part.paused_topics],
                inbox=whole.inbox + part.inbox,
                timers=whole.timers + part.timers,
            )
        return whole
