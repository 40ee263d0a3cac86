"""Tasks and calls of them."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from queen.tasks.connection import Connection
from queen.tasks.jobs import Job, Step, following_id

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
First = TypeVar("First")

# Longer than the server remembers the keys of jobs that have ended.
_TURN_SECONDS = 90 * 86_400


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How jobs of a task are run, unless a call says otherwise."""

    queue: str = "default"
    retries: int = 3
    backoff: float = 1.0
    backoff_cap: float = 300.0
    priority: int = 0
    timeout: float | None = None
    result_ttl: int | None = 86_400


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How one call is enqueued."""

    priority: int
    delay: float | None = None
    at: datetime | None = None
    unique: str | None = None


class Task(Generic[P, R]):
    """A function that workers run. Called directly, it is the function."""

    def __init__(
        self,
        connection: Connection,
        function: Callable[P, Awaitable[R]] | Callable[P, R],
        name: str,
        options: TaskOptions,
    ) -> None:
        self.connection = connection
        self.function = function
        self.name = name
        self.settings = options
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R] | R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name} of queue {self.settings.queue}>"

    @property
    def topic(self) -> str:
        """The topic of its jobs: each task has one of its own, so that it can be paused, counted and redriven."""
        return f"{self.settings.queue}/{self.name}"

    async def defer(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Have a worker call the function; the job is stored when this returns."""
        return await self._signature(args, kwargs).defer()

    def defer_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """The same from a program without an event loop."""
        return self._signature(args, kwargs).defer_sync()

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """A call to defer later, or as a step of a chain."""
        return self._signature(args, kwargs)

    def step(self: Task[Concatenate[First, P], R], *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """A later step of a chain: its first argument is the result of the step before."""
        return self._signature(args, kwargs)

    def options(
        self,
        *,
        delay: float | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        unique: str | None = None,
    ) -> Configured[P, R]:
        """The same task with other options: see `Configured.defer`."""
        if delay is not None and at is not None:
            raise ValueError("delay and at exclude each other")
        given = self.settings.priority if priority is None else priority
        return Configured(self, CallOptions(given, delay, at, unique))

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature[R]:
        return Signature(self, args, kwargs, CallOptions(self.settings.priority))


class Configured(Generic[P, R]):
    """A task with the options of a call."""

    def __init__(self, task: Task[P, R], options: CallOptions) -> None:
        self._task = task
        self._options = options

    async def defer(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """As `Task.defer`: after `delay` seconds, `at` a time, with a `priority` (lower first), or once if `unique`.

        While a job of the same `unique` key waits or runs no other is stored, and the one that is there is returned.
        """
        return await self.s(*args, **kwargs).defer()

    def defer_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """The same from a program without an event loop."""
        return self.s(*args, **kwargs).defer_sync()

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """A call to defer later, or as a step of a chain."""
        return Signature(self._task, args, kwargs, self._options)


class Signature(Generic[R]):
    """A call of a task, and those that follow it."""

    def __init__(
        self,
        task: Task[Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
        then: tuple[Signature[Any], ...] = (),
    ) -> None:
        self._task = task
        self._args = args
        self._kwargs = kwargs
        self._options = options
        self._then = then

    def then(self, following: Signature[S]) -> Signature[S]:
        """A chain: `following` is called with the result of this as its first argument."""
        steps = (*self._then, following, *following._then)
        return Signature(self._task, self._args, self._kwargs, self._options, steps)

    async def defer(self) -> Job[R]:
        """Defer the call; the job is that of the last step. Raises `TypeError` for arguments that do not fit."""
        step, item = self._item()
        connection = self._task.connection
        topic = connection.topic(self._task.topic)
        if not step.unique:
            await topic.enqueue(item)
            return Job(_last(step).job, connection)
        turn = _turn(await connection.run_kv(get_turn(step.unique)))
        while True:
            (identity,) = await topic.enqueue({**item, "idempotency_key": f"{step.unique}:{turn}"})
            # If a job has ended since, it may be the one that this was answered with, and has not seen what is new.
            now = _turn(await connection.run_kv(get_turn(step.unique)))
            if now == turn:
                return Job(_last_of(str(identity), step), connection)
            turn = now

    def defer_sync(self) -> Job[R]:
        """The same from a program without an event loop."""
        step, item = self._item()
        connection = self._task.connection
        topic = connection.sync.topic(connection.namespace, self._task.topic)
        if not step.unique:
            topic.enqueue(item)
            return Job(_last(step).job, connection)
        turn = _turn(connection.run_kv_sync(get_turn(step.unique)))
        while True:
            (identity,) = topic.enqueue({**item, "idempotency_key": f"{step.unique}:{turn}"})
            now = _turn(connection.run_kv_sync(get_turn(step.unique)))
            if now == turn:
                return Job(_last_of(str(identity), step), connection)
            turn = now

    def check(self) -> None:
        """Raises `TypeError` if the arguments do not fit."""
        self._item()

    def as_item(self) -> tuple[Job[R], dict[str, Any]]:
        """The job, and an item for the topic of the task; not for unique jobs, which need more than one request."""
        step, item = self._item()
        if step.unique:
            raise ValueError(f"task {self._task.name}: unique jobs are deferred one by one")
        connection = self._task.connection
        where = {"namespace": connection.namespace, "topic": self._task.topic}
        return Job(_last(step).job, connection), {**item, **where}

    def _item(self) -> tuple[Step, dict[str, Any]]:
        """The call, and the item that holds it."""
        step = self._step(self._args, self._options.unique)
        for following in self._then:
            # What comes out of the step before is not known yet.
            one = following._step((None, *following._args), None)
            del one.args[0]
            if step.unique:
                one.job = ""
            step.then.append(one)
        options = self._options
        item: dict[str, Any] = {"data": step, "idempotency_key": step.job, "priority": options.priority}
        if options.delay is not None:
            item["delay"] = options.delay
        if options.at is not None:
            item["deliver_after"] = options.at
        return step, item

    def _step(self, args: tuple[Any, ...], unique: str | None) -> Step:
        name = self._task.name
        try:
            inspect.signature(self._task.function).bind(*args, **self._kwargs)
        except TypeError as error:
            raise TypeError(f"task {name}: {error}") from None
        # A unique job is known by the id of its item, which is that of the job that exists already.
        job, key = (uuid.uuid4().hex, "") if unique is None else ("", f"{name}:{unique}")
        return Step(job, name, list(args), dict(self._kwargs), unique=key)


def _last(step: Step) -> Step:
    return step.then[-1] if step.then else step


def _last_of(identity: str, step: Step) -> str:
    """The id of the last step after a first one of that id."""
    for _ in step.then:
        identity = following_id(identity)
    return identity


def get_turn(unique: str) -> dict[str, Any]:
    """The operation that reads which turn of a unique key it is: each job that ends begins another."""
    return {"op": "get", "key": f"unique.{unique}"}


def next_turn(unique: str, turn: int) -> dict[str, Any]:
    """The operation that ends a turn of a unique key, however often: a job may run twice, and end twice."""
    return {"op": "incr", "key": f"unique.{unique}", "delta": 1, "max": turn + 1, "ttlSeconds": _TURN_SECONDS}


def _turn(found: list[dict[str, Any]]) -> int:
    return int(found[0]["value"]) if found[0]["found"] else 0
