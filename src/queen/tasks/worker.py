"""`Worker`: runs the tasks of an application in one process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import msgspec

from queen.client.errors import TRANSIENT, AuthError, DeadLetterError, text_of_error
from queen.tasks.app import App, Schedule
from queen.tasks.jobs import Context, Outcome, Step, _current, following_id, put_outcome
from queen.tasks.reports import Activity
from queen.tasks.task import Task, next_turn

_LARGEST_RESULT = (1 << 20) - 100
"""Bytes: what the server takes as the value of a key, less what stands around the result."""
_RETRY_SECONDS = 0.5
_NOT_STORED = "the outcome of a job cannot be stored"
_TOPIC_RETRIES = 3
"""The default of topics."""
_LOST_ATTEMPTS = 3
"""How often a job runs again, beyond its retries, because its worker died: perhaps it kills them."""

logger = logging.getLogger("queen.tasks")


class Worker:
    """Runs up to `concurrency` jobs at a time: coroutines in the event loop, functions in threads.

    SIGTERM, SIGINT and `stop` let it finish the jobs that run; leases of jobs are renewed while they do.
    """

    def __init__(
        self,
        app: App,
        *,
        queues: Collection[str] = (),
        concurrency: int = 10,
        lease_seconds: float = 30.0,
        stop_timeout: float | None = None,
    ) -> None:
        """Without `queues`, of all queues. A stop waits for jobs that run, at most `stop_timeout` seconds."""
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
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
        self._stop_timeout = stop_timeout
        self._activity = Activity(app, self._tasks, concurrency)
        self._limits = {topic: _Limits.of(task.settings.retries) for topic, task in self._tasks.items()}
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="queen-task")
        self._ended = asyncio.Event()

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run until `stop` is set, or SIGTERM or SIGINT come."""
        async with self._app.lifespan():
            ended = self._ended = stop or asyncio.Event()
            for task in self._tasks.values():
                await self._until_available(partial(self._configure, task), "the worker waits for the server")
            beside = [
                asyncio.create_task(self._schedule(one, ended))
                for one in self._app.schedules
                if one.task.topic in self._tasks
            ]
            for schedule in beside:
                # A schedule that fails ends the worker, which raises its error.
                schedule.add_done_callback(lambda _: ended.set())
            beside.append(asyncio.create_task(self._activity.report_until(ended)))
            logger.info("worker of %d tasks is ready (%d at a time)", len(self._tasks), self._concurrency)
            try:
                await self._consume(ended)
            finally:
                ended.set()
                await asyncio.gather(*beside)
                await self._activity.leave()
                # Functions that did not end in time go on until the process ends; their jobs are released already.
                self._threads.shutdown(wait=False, cancel_futures=True)
        logger.info("worker has stopped")

    async def _consume(self, ended: asyncio.Event) -> None:
        topics = self._app.connection.topic(*self._tasks)
        builder = topics.concurrency(self._concurrency).lease(self._lease_seconds)

        async def consume() -> None:
            await builder.consume(self._execute, signal=ended)

        consuming = asyncio.create_task(consume())
        if self._stop_timeout is None:
            await consuming
            return
        stopping = asyncio.create_task(ended.wait())
        await asyncio.wait({consuming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await asyncio.wait({consuming}, timeout=self._stop_timeout)
        if not consuming.done():
            logger.warning("jobs still running after %s s are released to other workers", self._stop_timeout)
            consuming.cancel()
            await asyncio.wait({consuming})
        if not consuming.cancelled():
            consuming.result()

    async def _configure(self, task: Task[Any, Any]) -> None:
        """Have the server retry as the task says, and deliver jobs again whose workers have died."""
        settings = task.settings
        wanted = {
            "max_retries": self._limits[task.topic].deliveries,
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
            logger.warning("this token may not set the retries of task %s, its topic has its own: %s", task, error)
            allowed = _TOPIC_RETRIES if counts is None else counts["options"]["max_retries"]
            self._limits[task.topic] = _Limits.of(settings.retries, allowed)

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
        # A unique job and a tick of a schedule have no id of their own.
        job = step.job or str(item["id"])
        attempt, turn, limits = item["retries"] + 1, _turn_of(item), self._limits[task.topic]
        if attempt > limits.deliveries and attempt > limits.retries + 1:
            text = f"the worker of attempt {attempt - 1} died, or could not reach the server for longer than its lease"
            logger.error("job %s of task %s failed for good: %s", job, task.name, text)
            await self._end(job, step, turn, Outcome("failed", error=text))
            raise DeadLetterError(text)
        # Beyond its retries a job comes only if workers have died: had it failed, it would be a dead letter.
        final = attempt > limits.retries
        began = time.monotonic()
        try:
            with self._activity.attempt(Context(job, task.name, attempt), final=final):
                result = _as_json(task, await self._call(task, step, Context(job, task.name, attempt)))
        except Exception as error:
            text = text_of_error(error)
            end = " for good" if final else ""
            logger.error("job %s of task %s failed%s: %s", job, task.name, end, text, exc_info=error)
            if final:
                await self._end(job, step, turn, Outcome("failed", error=text))
                raise DeadLetterError(text) from error
            raise
        if step.then:
            await self._continue(job, step.then, result)
        await self._end(job, step, turn, Outcome("done", result=result))
        logger.info("job %s of task %s done in %.3f s", job, task.name, time.monotonic() - began)

    async def _call(self, task: Task[Any, Any], step: Step, context: Context) -> Any:
        token = _current.set(context)
        try:
            if inspect.iscoroutinefunction(task.function):
                return await _within(task.settings.timeout, task.function(*step.args, **step.kwargs))
            inside = copy_context()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._threads, lambda: inside.run(task.function, *step.args, **step.kwargs)
            )
        except (Exception, GeneratorExit):
            raise
        # None of the others may end the worker, and the other jobs with it: Ctrl-C is a signal that it handles.
        except SystemExit as error:
            raise RuntimeError(f"the task called sys.exit({error.code!r})") from error
        except asyncio.CancelledError as error:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise
            raise RuntimeError("something that the task waited for was cancelled") from error
        except BaseException as error:
            raise RuntimeError(f"the task raised {text_of_error(error)}") from error
        finally:
            with contextlib.suppress(ValueError):
                _current.reset(token)

    async def _end(self, job: str, step: Step, turn: int, outcome: Outcome) -> None:
        """Keep the outcome of a job, also as that of the steps that will not follow, and free its unique key."""
        outcomes = [(job, step.task)]
        if outcome.status == "failed":
            for following in step.then:
                job = following.job or following_id(job)
                outcomes.append((job, following.task))
        operations = [
            put_outcome(one, outcome, seconds)
            for one, name in outcomes
            if (seconds := self._app.find(name).settings.result_ttl) is not None
        ]
        if step.unique:
            operations.append(next_turn(step.unique, turn))
        if operations:
            await self._until_available(lambda: self._app.connection.run_kv(*operations), _NOT_STORED)

    async def _continue(self, job: str, steps: list[Step], result: Any) -> None:
        """Enqueue the next step of a chain; its id is its key, so a job that runs again does not double it."""
        following, *rest = steps
        task = self._app.find(following.task)
        following.job = following.job or following_id(job)
        following.args = [result, *following.args]
        following.then = rest
        item = {"data": following, "idempotency_key": following.job, "priority": task.settings.priority}
        await self._until_available(lambda: self._app.connection.topic(task.topic).enqueue(item), _NOT_STORED)

    async def _until_available(self, send: Callable[[], Awaitable[object]], waiting: str) -> None:
        """Send something; while the server is unavailable again and again, unless the worker is to stop."""
        while True:
            try:
                await send()
                return
            except TRANSIENT as error:
                if self._ended.is_set():
                    raise
                logger.warning("%s, trying again: %s", waiting, error)
            await asyncio.sleep(_RETRY_SECONDS)


class _Limits(NamedTuple):
    """How often a job may fail and be tried again, and how often it is run at all."""

    retries: int
    deliveries: int

    @classmethod
    def of(cls, retries: int, allowed: float = math.inf) -> _Limits:
        """`allowed` are the retries of the topic, where they are not for the worker to set."""
        return cls(int(min(retries, allowed)), int(min(retries + _LOST_ATTEMPTS, allowed)))


def _turn_of(item: dict[str, Any]) -> int:
    """Which turn of its unique key a job is; 0 where it has none."""
    _, _, turn = (item["idempotency_key"] or "").rpartition(":")
    return int(turn) if turn.isdecimal() else 0


async def _within(seconds: float | None, running: Coroutine[Any, Any, Any]) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await running
    except TimeoutError as error:
        # One that the task itself raised says what it was about.
        if limit.expired():
            raise TimeoutError(f"took longer than its timeout of {seconds:g} s") from error
        raise


def _as_json(task: Task[Any, Any], result: Any) -> Any:
    """A result as it is stored; raises `TypeError` or `ValueError` where that is not possible."""
    try:
        encoded = msgspec.json.encode(result)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the result of a task has to be JSON: {error}") from error
    if task.settings.result_ttl is not None and len(encoded) > _LARGEST_RESULT:
        raise ValueError(
            f"the result of a task may have {_LARGEST_RESULT} bytes as JSON, not {len(encoded)}:"
            " return where it is, or keep none with result_ttl=None"
        )
    return msgspec.json.decode(encoded)
