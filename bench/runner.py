"""Runs the workloads, group by group and repetition by repetition, and hands back what was measured."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import singledispatchmethod

import asyncpg

from bench.generator import Generator, LoadError, LoadResult, nothing
from bench.limit import measure_limit
from bench.metrics import load_metrics, usage_metrics
from bench.postgres import commit_p50_ms, not_durable, read_settings, stored_bytes, wal_fsyncs, wal_fsyncs_since
from bench.processes import Usage
from bench.report import Measurement
from bench.settings import Settings
from bench.target import Target, fresh_server, running_server
from bench.workloads import CommitWorkload, LimitWorkload, Load, LoadWorkload, StorageWorkload, Workload


class Run:
    """One run of the benchmark: collects measurements, warnings and the settings of PostgreSQL."""

    def __init__(self, settings: Settings, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._report = report
        self.measurements: list[Measurement] = []
        self.warnings: list[str] = []
        self.postgres: dict[str, str] = {}
        self.durable = True

    async def all(self, workloads: list[Workload]) -> None:
        """Whole repetitions one after the other, so that slow and fast minutes spread over all workloads."""
        for repetition in range(self._settings.repeat):
            due = [each for each in workloads if repetition == 0 or not each.once]
            for group in dict.fromkeys(each.group for each in due):
                await self._group(group, [each for each in due if each.group == group], repetition)

    async def _group(self, group: str, workloads: list[Workload], repetition: int) -> None:
        where = self._settings.against or "a fresh server"
        self._report(f"repetition {repetition + 1} of {self._settings.repeat}: {group}, on {where}")
        async with self._target() as target:
            await self._note_settings(target)
            session = Session(self._settings, target, repetition, self._report)
            for workload in workloads:
                self._note(await self._measure(session, workload, repetition))

    async def _measure(self, session: "Session", workload: Workload, repetition: int) -> Measurement | None:
        """A workload that cannot be done is an error in the report; the others are still measured."""
        try:
            return await session.run(workload)
        except (LoadError, OSError, asyncpg.PostgresError) as error:
            return Measurement(workload.name, workload.title, repetition, {}, 1, str(error))

    def _note(self, measurement: Measurement | None) -> None:
        if measurement is not None:
            self.measurements.append(measurement)
            self._report(brief(measurement))

    @asynccontextmanager
    async def _target(self) -> AsyncIterator[Target]:
        s = self._settings
        manager = running_server(s.against, s.dsn, s.server_pid) if s.against else fresh_server(s.workers)
        async with manager as target:
            yield target

    async def _note_settings(self, target: Target) -> None:
        if target.database is None:
            self._warn("no --dsn: durability, the limit, commits and stored bytes were not looked at")
            return
        self.postgres = await read_settings(target.database)
        for setting in not_durable(self.postgres):
            self.durable = False
            self._warn(f"not durable: PostgreSQL runs with {setting}; the numbers do not count")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


class Session:
    """The workloads of one group on one server."""

    def __init__(self, settings: Settings, target: Target, repetition: int, report: Callable[[str], None]) -> None:
        self._settings = settings
        self._target = target
        self._repetition = repetition
        self._report = report
        self._generator = Generator(target.host, target.port)
        self._token = secrets.token_hex(4)
        self._commit_ms: float | None = None

    @singledispatchmethod
    async def run(self, workload: Workload) -> Measurement | None:
        """Runs one workload; None when this target does not allow it."""
        raise TypeError(f"no way to run a {type(workload).__name__}")

    @run.register
    async def _(self, workload: LoadWorkload) -> Measurement | None:
        for step in workload.prepare:
            await self._prepare(step)
        fsyncs = await self._fsyncs_before(workload)
        usage = Usage(self._target.watched)
        async with memory_watched(usage):
            result = await self._drive(workload.measure, usage.start, usage.stop)
        metrics = load_metrics(result, workload.latency) | usage_metrics(usage, result)
        measurement = self._measurement(workload, metrics)
        measurement.errors = result.errors.total
        measurement.first_error = result.errors.first
        measurement.series = result.series
        if result.messages == 0:
            measurement.errors += 1
            measurement.first_error = measurement.first_error or "no message in the measured time"
        if workload.name == "latency-push":
            await self._judge_single_push(measurement, result, fsyncs)
        return measurement

    @run.register
    async def _(self, workload: LimitWorkload) -> Measurement | None:
        database = self._target.database
        if database is None:
            return None
        watched = self._target.watched
        before = watched.cpu()
        result = await measure_limit(database, workload.segment_size, self._settings.seconds)
        metrics = {"messages_per_s": result.messages_per_s, "generator_cpu_s": result.cpu_s}
        if watched.postmasters:
            metrics["postgres_cpu_s"] = watched.cpu().since(before).postgres
        return self._measurement(workload, metrics | {"messages": result.messages, "seconds": result.seconds})

    @run.register
    async def _(self, workload: CommitWorkload) -> Measurement | None:
        if self._target.database is None:
            return None
        self._commit_ms = await commit_p50_ms(self._target.database)
        return self._measurement(workload, {"p50_ms": self._commit_ms})

    @run.register
    async def _(self, workload: StorageWorkload) -> Measurement | None:
        database = self._target.database
        if database is None:
            return None
        before = await stored_bytes(database)
        await self._prepare(workload.fill)
        grown = await stored_bytes(database) - before
        messages = int(workload.fill.options["total"])
        return self._measurement(workload, {"bytes_per_message": grown / messages, "messages": messages})

    async def _prepare(self, step: Load) -> None:
        total = int(step.options["total"])
        if total > 50_000:
            self._report(f"  preparing {total:,} messages in {step.options['queue']}")
        result = await self._drive(step)
        if result.errors.total or result.total_pushed != total:
            raise LoadError(
                f"preparing {step.options['queue']}: {result.total_pushed:,} of {total:,} messages stored,"
                f" {result.errors.total} errors; the first: {result.errors.first or 'none'}"
            )

    async def _drive(
        self, load: Load, on_start: Callable[[], None] = nothing, on_stop: Callable[[], None] = nothing
    ) -> LoadResult:
        """Queue names are new in every session: a running server may hold those of an earlier run."""
        options = load.options | {"queue": f"bench-{self._token}-{load.options['queue']}"}
        return await self._generator.run(load.mode, options, on_start, on_stop)

    async def _fsyncs_before(self, workload: Workload) -> int | None:
        if workload.name != "latency-push" or self._target.database is None:
            return None
        return await wal_fsyncs(self._target.database)

    async def _judge_single_push(self, measurement: Measurement, result: LoadResult, fsyncs_before: int | None) -> None:
        """Pushes on one connection cannot share WAL flushes: there must be one flush per push."""
        if self._commit_ms:
            measurement.metrics["commits"] = result.push_ms.p50 / self._commit_ms
        if fsyncs_before is None or self._target.database is None:
            return
        enough = 0.95 * result.total_pushed
        flushed = await wal_fsyncs_since(self._target.database, fsyncs_before, enough)
        measurement.metrics["fsyncs_per_push"] = flushed / max(result.total_pushed, 1)
        if flushed < enough:
            measurement.errors += 1
            measurement.first_error = (
                f"not durable: {result.total_pushed:,} single pushes answered, only {flushed:,} WAL flushes"
            )

    def _measurement(self, workload: Workload, metrics: dict[str, float]) -> Measurement:
        return Measurement(workload.name, workload.title, self._repetition, metrics)


@asynccontextmanager
async def memory_watched(usage: Usage) -> AsyncIterator[None]:
    watching = asyncio.create_task(usage.watch_memory())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def brief(measurement: Measurement) -> str:
    metrics = measurement.metrics
    parts = [f"  {measurement.workload:<16}"]
    if "messages_per_s" in metrics:
        parts.append(f"{metrics['messages_per_s']:>11,.0f} msg/s")
    if "p50_ms" in metrics:
        parts.append(f"p50 {metrics['p50_ms']:.2f} ms")
    if "bytes_per_message" in metrics:
        parts.append(f"{metrics['bytes_per_message']:.0f} bytes per message")
    if measurement.errors:
        parts.append(f"{measurement.errors} ERRORS, the first: {measurement.first_error}")
    return "  ".join(parts)
