"""Everything that a scrape of metrics shows, gathered at one moment."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import asyncpg

from queen.broker.inspect.groups import Groups
from queen.errors import QueenError
from queen.metrics.counters import WorkerTally
from queen.metrics.report import Report
from queen.monitoring.history import History, Standings
from queen.monitoring.recorder import Recorder
from queen.storage.database import Database

log = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 5.0
_GROUPS_PER_QUEUE: Final = 10


@dataclass(frozen=True, slots=True)
class Lag:
    """How many messages a group has before it on a queue."""

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
class Cluster:
    """What PostgreSQL knows, of all hosts. `queues` names those with the most pending messages, at most the limit."""

    lifetime: WorkerTally
    workers: Sequence[Mapping[str, Any]]
    """The last flush of each worker."""
    rates: Mapping[str, Mapping[str, Any]]
    """What happened to each queue in a minute, as of the last flushes."""
    queues: Sequence[str]
    queues_left_out: int
    pending: Mapping[str, int]
    lags: Sequence[Lag]
    lags_left_out: int
    dead_letters: Mapping[str, int]
    inbox: Inbox


@dataclass(frozen=True, slots=True)
class Scrape:
    """The workers of this host, and (None while PostgreSQL is away) the cluster."""

    reports: Sequence[Report]
    cluster: Cluster | None = field(default=None)


class Scraper:
    """Gathers metrics."""

    def __init__(
        self,
        database: Database,
        groups: Groups,
        history: History,
        recorder: Recorder,
        standings: Standings,
        most_queues: int,
    ) -> None:
        self._database = database
        self._standings = standings
        self._groups = groups
        self._history = history
        self._recorder = recorder
        self._most_queues = most_queues

    async def scrape(self) -> Scrape:
        """What there is to say now. The workers can be seen without PostgreSQL, the cluster cannot."""
        reports = await self._recorder.pinned_reports()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return Scrape(reports, await self._cluster(reports))
        except (TimeoutError, QueenError, asyncpg.PostgresError) as error:
            log.warning("metrics of this host alone, because PostgreSQL does not answer: %s", error)
            return Scrape(reports)

    async def _cluster(self, reports: Sequence[Report]) -> Cluster:
        standings = await self._standings()
        ranked = sorted(standings, key=lambda row: (-row["pending"], -row["pushed"], row["name"]))
        chosen = {row["name"] for row in ranked[: self._most_queues]}
        lags = [
            Lag(row["queue_name"], row["group_name"], row["behind"])
            for row in await self._groups.lags()
            if row["queue_name"] in chosen
        ]
        lags.sort(key=lambda lag: (-lag.messages, lag.queue, lag.group))
        most = _GROUPS_PER_QUEUE * self._most_queues
        letters = await self._database.fetch("dead_letter_counts")
        workers = [dict(row) for row in await self._database.fetch("last_flushes", self._recorder.gone_after)]
        rates = await self._database.fetch("last_queue_flushes", self._recorder.gone_after)
        flushed = {str(row["life"]) for row in workers}
        fresh = [report for report in reports if report.life not in flushed]
        return Cluster(
            lifetime=await self._history.lifetime(),
            workers=[*workers, *({**report.worker_rows()[-1], "age": 0.0} for report in fresh)],
            rates=_with_fresh({row["queue_name"]: dict(row) for row in rates}, fresh),
            queues=sorted(chosen),
            queues_left_out=len(standings) - len(chosen),
            pending={row["name"]: row["pending"] for row in standings},
            lags=lags[:most],
            lags_left_out=max(0, len(lags) - most),
            dead_letters={row["name"]: row["messages"] for row in letters},
            inbox=await self._inbox(),
        )

    async def _inbox(self) -> Inbox:
        (row,) = await self._database.fetch("inbox_standing")
        return Inbox(*row)


def _with_fresh(rates: dict[str, dict[str, Any]], fresh: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """Add what workers have counted that have not flushed yet, so that a new server does not look dead."""
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
    """Shard 0 keeps what was counted; every shard tells what its queues hold."""

    def __init__(self, first: Scraper, others: Sequence[Scraper]) -> None:
        super().__init__(
            first._database, first._groups, first._history, first._recorder, first._standings, first._most_queues
        )
        self._others = others

    async def _cluster(self, reports: Sequence[Report]) -> Cluster:
        whole = await super()._cluster(reports)
        for other in self._others:
            try:
                part = await other._cluster(reports)
            except (QueenError, asyncpg.PostgresError) as error:
                log.warning("metrics without one of the shards: %s", error)
                continue
            whole = dataclasses.replace(
                whole,
                queues=sorted({*whole.queues, *part.queues}),
                queues_left_out=whole.queues_left_out + part.queues_left_out,
                pending={**whole.pending, **part.pending},
                lags=[*whole.lags, *part.lags],
                lags_left_out=whole.lags_left_out + part.lags_left_out,
                dead_letters={**whole.dead_letters, **part.dead_letters},
                inbox=whole.inbox + part.inbox,
            )
        return whole
