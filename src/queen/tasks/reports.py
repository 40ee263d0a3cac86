"""What a worker reports to the server, for `GET /api/v1/tasks` and the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from queen.client.errors import RequestError, text_of_error
from queen.tasks.app import App, Schedule
from queen.tasks.jobs import Context
from queen.tasks.task import Task
from queen.wire.api.resources.tasks import (
    APPLICATION_KEY,
    WORKER_PREFIX,
    FailedAttempt,
    RunningJob,
    TaskApplication,
    TaskDeclaration,
    TaskSchedule,
    TaskWork,
    WorkerReport,
)

_REPORT_SECONDS = 5.0
# A worker that misses so many reports is not shown any more.
_ALIVE_SECONDS = 30
_LEAVE_SECONDS = 2.0
_APPLICATION_SECONDS = 30 * 86_400
_APPLICATION_REPORTS = 720
_RATE_SECONDS = 60.0
_MOST_RUNNING = 50
_MOST_FAILURES = 20
_LONGEST_ERROR = 500

logger = logging.getLogger("queen.tasks")


class Activity:
    """What a worker does and has done, and the task that reports it."""

    def __init__(self, app: App, tasks: Mapping[str, Task[Any, Any]], concurrency: int) -> None:
        self._app = app
        self._id = uuid.uuid4().hex
        self._work = {task.name: TaskWork(task.name) for task in tasks.values()}
        self._running: dict[str, RunningJob] = {}
        self._failures: deque[FailedAttempt] = deque(maxlen=_MOST_FAILURES)
        self._past: deque[tuple[float, dict[str, tuple[int, int]]]] = deque()
        self._queues = sorted({task.settings.queue for task in tasks.values()})
        self._concurrency = concurrency
        self._started_at = datetime.now(UTC)

    @contextmanager
    def attempt(self, context: Context, *, final: bool) -> Iterator[None]:
        """Count what runs inside."""
        work, began = self._work[context.task], time.monotonic()
        self._running[context.job] = RunningJob(context.job, context.task, context.attempt, datetime.now(UTC))
        work.running += 1
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                work.failed += 1
                text = text_of_error(error)[:_LONGEST_ERROR]
                now = datetime.now(UTC)
                self._failures.append(FailedAttempt(context.job, context.task, context.attempt, text, now, final))
            raise
        else:
            work.done += 1
            work.seconds += time.monotonic() - began
        finally:
            work.running -= 1
            self._running.pop(context.job, None)

    async def report_until(self, stop: asyncio.Event) -> None:
        """Report every few seconds. What cannot be reported is not shown: jobs run."""
        said = ""
        for number in itertools.count():
            try:
                await self._report(with_application=number % _APPLICATION_REPORTS == 0)
                said = ""
            except RequestError as error:
                if said != str(error):
                    said = str(error)
                    logger.warning("the worker is not shown on the dashboard: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_SECONDS):
                    await stop.wait()
            if stop.is_set():
                break

    async def leave(self) -> None:
        """Say that the worker has stopped."""
        with contextlib.suppress(RequestError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._app.connection.run_kv({"op": "delete", "key": WORKER_PREFIX + self._id})

    async def _report(self, *, with_application: bool) -> None:
        key = WORKER_PREFIX + self._id
        operations: list[dict[str, Any]] = [
            {"op": "put", "key": key, "value": self._current(), "ttlSeconds": _ALIVE_SECONDS}
        ]
        if with_application:
            described = _describe(self._app)
            operations.append(
                {"op": "put", "key": APPLICATION_KEY, "value": described, "ttlSeconds": _APPLICATION_SECONDS}
            )
        await self._app.connection.run_kv(*operations)

    def _current(self) -> WorkerReport:
        return WorkerReport(
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues,
            concurrency=self._concurrency,
            started_at=self._started_at,
            tasks=self._rated(time.monotonic()),
            running=list(self._running.values())[:_MOST_RUNNING],
            failures=list(reversed(self._failures)),
        )

    def _rated(self, now: float) -> list[TaskWork]:
        """The work of each task, with what was done since a minute ago."""
        past = self._past
        while len(past) > 1 and past[1][0] <= now - _RATE_SECONDS:
            past.popleft()
        if past:
            since, counts = past[0]
            minutes = max(now - since, _REPORT_SECONDS) / 60
            for name, (done, failed) in counts.items():
                work = self._work[name]
                work.done_per_minute = round((work.done - done) / minutes, 2)
                work.failed_per_minute = round((work.failed - failed) / minutes, 2)
        past.append((now, {name: (one.done, one.failed) for name, one in self._work.items()}))
        return list(self._work.values())


def _describe(app: App) -> TaskApplication:
    return TaskApplication([_declared(task) for task in app.tasks.values()], list(_scheduled(app.schedules)))


def _declared(task: Task[Any, Any]) -> TaskDeclaration:
    settings = task.settings
    return TaskDeclaration(task.name, settings.queue, task.topic, settings.retries, settings.timeout)


def _scheduled(schedules: Iterable[Schedule]) -> Iterator[TaskSchedule]:
    for one in schedules:
        yield TaskSchedule(one.task.name, one.expression, one.timezone)
