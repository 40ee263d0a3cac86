"""`Worker`: runs the tasks of an application in one process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import msgspec

from queen.client.errors import AuthError
from queen.tasks.app import App, Schedule
from queen.tasks.jobs import Context, Outcome, Step, _current
from queen.tasks.task import Task

logger = logging.getLogger("queen.tasks")


class Worker:
    """Runs up to `concurrency` jobs at a time: coroutines in the event loop, functions in threads.

    SIGTERM, SIGINT and `stop` let it finish the jobs that run; leases of jobs are renewed while they do.
    """

    def __init__(
        self, app: App, *, queues: Collection[str] = (), concurrency: int = 10, lease_seconds: float = 30.0
    ) -> None:
        """Without `queues`, of all queues."""
        known = {task.settings.queue for task in app.tasks.values()}
        unknown = sorted(set(queues) - known)
        if unknown:
            raise ValueError(f"no task has the queue {', '.join(unknown)}; queues are {', '.join(sorted(known))}")
        self._app = app
        self._tasks = {task.topic: task for task in app.tasks.values() if not queues or task.settings.queue in queues}
        if not self._tasks:
            raise ValueError("the application has no tasks: is the module imported that declares them?")
        self._concurrency = concurrency
        self._lease_seconds = lease_seconds
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="queen-task")

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run until it is told to stop."""
        for task in self._tasks.values():
            await self._configure(task)
        ended = stop or asyncio.Event()
        schedules = [
            asyncio.create_task(self._schedule(one, ended))
            for one in self._app.schedules
            if one.task.topic in self._tasks
        ]
        topics = self._app.connection.topic(*self._tasks)
        logger.info("worker of %d tasks is ready (%d at a time)", len(self._tasks), self._concurrency)
        try:
            consumer = topics.concurrency(self._concurrency).lease(self._lease_seconds)
            await consumer.consume(self._execute, signal=ended)
        finally:
            ended.set()
            await asyncio.gather(*schedules)
            self._threads.shutdown()
        logger.info("worker has stopped")

    async def _configure(self, task: Task[Any, Any]) -> None:
        """Have the server retry as the task says."""
        settings = task.settings
        wanted = {
            "max_retries": settings.retries,
            "backoff_base_ms": round(settings.backoff * 1000),
            "backoff_cap_ms": round(settings.backoff_cap * 1000),
        }
        topic = self._app.connection.topic(task.topic)
        counts = await topic.counts()
        if counts is not None and wanted.items() <= counts["options"].items():
            return
        try:
            await topic.configure(**wanted)
        except AuthError as error:
            logger.warning("retries of task %s are those of its topic, this token may not set them: %s", task, error)

    async def _schedule(self, schedule: Schedule, stop: asyncio.Event) -> None:
        task = schedule.task
        step = Step("", task.name, list(schedule.args), dict(schedule.kwargs))
        topic = self._app.connection.topic(task.topic).priority(task.settings.priority)
        name = f"{task.name} {schedule.expression} {schedule.timezone}"
        await topic.schedule(
            schedule.expression,
            {"data": msgspec.to_builtins(step)},
            name=name,
            timezone=schedule.timezone,
            catch_up=schedule.catch_up,
            signal=stop,
        )

    async def _execute(self, item: dict[str, Any]) -> None:
        """Run a job; raising has the server retry it."""
        task = self._tasks[item["topic"]]
        step = msgspec.convert(item["data"], Step)
        # A tick of a schedule has no id of its own.
        job = step.job or str(item["id"])
        began = time.monotonic()
        try:
            result = await self._call(task, step, Context(job, task.name, item["retries"] + 1))
        except Exception as error:
            final = item["retries"] >= task.settings.retries
            text = f"{type(error).__name__}: {error}"
            logger.error("job %s of task %s failed%s: %s", job, task.name, " for good" if final else "", text)
            if final:
                await self._save(task, job, Outcome("failed", error=text))
            raise
        await self._save(task, job, Outcome("done", result=result))
        if step.then:
            await self._continue(step.then, result)
        logger.info("job %s of task %s done in %.3f s", job, task.name, time.monotonic() - began)

    async def _call(self, task: Task[Any, Any], step: Step, context: Context) -> Any:
        token = _current.set(context)
        try:
            if inspect.iscoroutinefunction(task.function):
                async with asyncio.timeout(task.settings.timeout):
                    return await task.function(*step.args, **step.kwargs)
            inside = copy_context()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._threads, lambda: inside.run(task.function, *step.args, **step.kwargs)
            )
        finally:
            with contextlib.suppress(ValueError):
                _current.reset(token)

    async def _save(self, task: Task[Any, Any], job: str, outcome: Outcome) -> None:
        if task.settings.result_ttl is not None:
            await self._app.connection.outcomes.save(job, outcome, task.settings.result_ttl)

    async def _continue(self, steps: list[Step], result: Any) -> None:
        """Enqueue the next step of a chain; its id is its key, so a job that runs again does not double it."""
        following, *rest = steps
        task = self._app.find(following.task)
        following.args = [result, *following.args]
        following.then = rest
        item = {"data": following, "idempotency_key": following.job, "priority": task.settings.priority}
        await self._app.connection.topic(task.topic).enqueue(item)
