"""Tasks and calls of them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from queen.tasks.connection import Connection
from queen.tasks.jobs import Job, Step

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
First = TypeVar("First")


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

    def defer_sync(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The same from a program without an event loop; returns the id of the job."""
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

        While a job of the same `unique` key waits or runs, and at least an hour from its enqueue, no other is stored.
        """
        return await self.s(*args, **kwargs).defer()

    def defer_sync(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The same from a program without an event loop; returns the id of the job."""
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
        """Defer the call; the job is that of the last step."""
        step, last = self._step()
        connection = self._task.connection
        await connection.topic(self._task.topic).enqueue(self._item(step))
        return Job(last.job, last.task, connection.outcomes)

    def defer_sync(self) -> str:
        """The same from a program without an event loop; returns the id of the job."""
        step, last = self._step()
        connection = self._task.connection
        connection.sync.topic(connection.namespace, self._task.topic).enqueue(self._item(step))
        return last.job

    def _step(self) -> tuple[Step, Step]:
        steps = [one._call() for one in (self, *self._then)]
        steps[0].then = steps[1:]
        return steps[0], steps[-1]

    def _call(self) -> Step:
        unique = self._options.unique
        identity = uuid.uuid4().hex if unique is None else f"{self._task.name}:{unique}"
        return Step(identity, self._task.name, list(self._args), dict(self._kwargs))

    def _item(self, step: Step) -> dict[str, Any]:
        options = self._options
        item: dict[str, Any] = {"data": step, "idempotency_key": step.job, "priority": options.priority}
        if options.delay is not None:
            item["delay"] = options.delay
        if options.at is not None:
            item["deliver_after"] = options.at
        return item
