"""`App`: the tasks of an application, and the connection to its server."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ParamSpec, Protocol, Self, TypeVar, overload

from queen.client.topics.schedule import check_schedule
from queen.suggestions import did_you_mean
from queen.tasks.connection import Connection
from queen.tasks.jobs import Job
from queen.tasks.task import Signature, Task, TaskOptions

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What `app.task(...)` returns."""

    @overload
    def __call__(self, function: Callable[P, Awaitable[R]]) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> Task[P, R]: ...


class App:
    """An application: tasks that are deferred to queues and run by `queen worker module:app`.

    app = App("http://localhost:6632")

    @app.task(queue="mail", retries=5)
    async def send(to: str) -> None: ...

    await send.defer("alice@example.com")
    """

    def __init__(
        self,
        server: Any = "http://localhost:6632",
        *,
        namespace: str = "tasks",
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
        **options: Any,
    ) -> None:
        """`server` and `options` are those of `Queen`; applications in different namespaces do not meet.

        `lifespan` is a context in which each process of a worker runs its jobs: for pools and clients that they share.
        """
        self.lifespan = lifespan
        self.connection = Connection(server, namespace, options)
        self.tasks: dict[str, Task[Any, Any]] = {}
        self.schedules: list[Schedule] = []

    @property
    def namespace(self) -> str:
        return self.connection.namespace

    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        retries: int = 3,
        backoff: float = 1.0,
        backoff_cap: float = 300.0,
        priority: int = 0,
        timeout: float | None = None,
        result_ttl: int | None = 86_400,
    ) -> Decorator: ...
    def task(
        self,
        function: Any = None,
        *,
        name: str | None = None,
        queue: str = "default",
        retries: int = 3,
        backoff: float = 1.0,
        backoff_cap: float = 300.0,
        priority: int = 0,
        timeout: float | None = None,
        result_ttl: int | None = 86_400,
    ) -> Any:
        """Make a function or coroutine function a task: `@app.task`, or `@app.task(...)` with options.

        A job that fails is retried `retries` times, after `backoff` seconds, twice that, and so on up to
        `backoff_cap`; then it is a dead letter. Jobs with a lower `priority` run first. `timeout` is in seconds, and
        for coroutine functions alone: a thread cannot be stopped. Results are kept for `result_ttl` seconds; None: not
        at all.
        """
        options = TaskOptions(queue, retries, backoff, backoff_cap, priority, timeout, result_ttl)
        if retries < 0 or backoff < 0 or backoff_cap < 0:
            raise ValueError("retries, backoff and backoff_cap must not be negative")

        def decorate(function: Any) -> Any:
            if timeout is not None and not inspect.iscoroutinefunction(function):
                raise ValueError(f"task {function.__name__} has a timeout, and has to be an `async def` for that")
            return self._add(Task(self.connection, function, name or function.__name__, options))

        return decorate if function is None else decorate(function)

    def cron(
        self, expression: str, *args: Any, timezone: str = "UTC", catch_up: float = 0.0, **kwargs: Any
    ) -> Callable[[Task[P, R]], Task[P, R]]:
        """Defer a task at every tick of a cron expression, once however many workers run; goes above `@app.task`."""

        check_schedule(expression, timezone, catch_up)

        def decorate(task: Task[P, R]) -> Task[P, R]:
            if not isinstance(task, Task):
                raise TypeError("@app.cron goes above @app.task, and decorates a task")
            task.s(*args, **kwargs).check()
            self.schedules.append(Schedule(task, expression, args, kwargs, timezone, catch_up))
            return task

        return decorate

    def job(self, identity: str) -> Job[Any]:
        """A job by its id, to ask for its status and result."""
        return Job(identity, self.connection)

    async def defer_many(self, calls: Iterable[Signature[Any]]) -> list[Job[Any]]:
        """Defer calls of one or several tasks in one request: all are stored, or none. Not for unique jobs."""
        items = []
        jobs = []
        for call in calls:
            job, item = call.as_item()
            items.append(item)
            jobs.append(job)
        if items:
            await self.connection.queen.request("POST", "/api/v1/topics/enqueue", items)
        return jobs

    def find(self, name: str) -> Task[Any, Any]:
        """A task by its name."""
        try:
            return self.tasks[name]
        except KeyError:
            hint = did_you_mean(name, self.tasks)
            raise LookupError(f"there is no task {name!r}" + (f": {hint}" if hint else "")) from None

    async def close(self) -> None:
        """Close the connection to the server."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _add(self, task: Task[Any, Any]) -> Task[Any, Any]:
        if task.name in self.tasks:
            raise ValueError(f"there is a task {task.name!r} already: give one of them another name=")
        self.tasks[task.name] = task
        return task


class Schedule:
    """When a task is deferred by itself."""

    def __init__(
        self,
        task: Task[Any, Any],
        expression: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timezone: str,
        catch_up: float,
    ) -> None:
        self.task = task
        self.expression = expression
        self.args = args
        self.kwargs = kwargs
        self.timezone = timezone
        self.catch_up = catch_up
