"""Applications of `queen.tasks`: what their workers store as keys of the namespace, and the structs of the routes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from queen.wire.fields import Answer, Count, OptionalName, Query

APPLICATION_KEY: Final = "app"
WORKER_PREFIX: Final = "worker."


class TaskDeclaration(msgspec.Struct, rename="camel"):
    """A task, as the application declares it."""

    task: str
    queue: str
    topic: str
    retries: int
    timeout: Annotated[float | None, Meta(description="Seconds; null: none.")] = None


class TaskSchedule(msgspec.Struct, rename="camel"):
    """When a task is deferred by itself."""

    task: str
    expression: str
    timezone: str


class TaskApplication(msgspec.Struct, rename="camel"):
    """An application: written by its workers when they start, under `APPLICATION_KEY`."""

    tasks: list[TaskDeclaration]
    schedules: list[TaskSchedule] = []


class RunningJob(msgspec.Struct, rename="camel"):
    """A job that a worker runs."""

    job: str
    task: str
    attempt: int
    since: datetime


class FailedAttempt(msgspec.Struct, rename="camel"):
    """An attempt that failed; the last one if `final`."""

    job: str
    task: str
    attempt: int
    error: str
    at: datetime
    final: bool


class TaskWork(msgspec.Struct, rename="camel"):
    """What a worker does of a task, has done since it started, and at what rate in the last minute."""

    task: str
    running: int = 0
    done: int = 0
    failed: int = 0
    seconds: Annotated[float, Meta(description="Running time of all that was done.")] = 0.0
    done_per_minute: float = 0.0
    failed_per_minute: float = 0.0


class WorkerReport(msgspec.Struct, rename="camel"):
    """A worker: written by it every few seconds, under `WORKER_PREFIX` and its id."""

    host: str
    pid: int
    queues: list[str]
    concurrency: int
    started_at: datetime
    tasks: list[TaskWork] = []
    running: Annotated[list[RunningJob], Meta(description="The longest running ones.")] = []
    failures: Annotated[list[FailedAttempt], Meta(description="The newest ones.")] = []


class TaskApplicationsQuery(Query):
    """Which applications."""

    namespace: Annotated[OptionalName, Meta(description="Only the application of this namespace.")] = ""


class TaskView(TaskDeclaration):
    """A task: its jobs by state, and what the workers that are alive have done of it since they started."""

    ready: Count = 0
    delayed: Count = 0
    leased: Count = 0
    dead: Count = 0
    paused: bool = False
    workers: Annotated[int, Meta(ge=0, description="Workers that run jobs of it.")] = 0
    running: Count = 0
    done: Count = 0
    failed: Annotated[int, Meta(ge=0, description="Attempts that failed.")] = 0
    done_per_minute: float = 0.0
    failed_per_minute: float = 0.0
    mean_seconds: Annotated[float | None, Meta(description="Of the jobs that are done; null before the first.")] = None


class WorkerView(Answer):
    """A worker that is alive: it has reported within the last half minute."""

    id: str
    host: str
    pid: int
    queues: list[str]
    concurrency: int
    started_at: datetime
    seen_at: datetime
    tasks: list[TaskWork]
    running: Annotated[list[RunningJob], Meta(description="The longest running ones.")]
    failures: Annotated[list[FailedAttempt], Meta(description="The newest ones.")]


class TaskApplicationView(Answer):
    """An application of `queen.tasks`."""

    namespace: str
    tasks: list[TaskView]
    schedules: list[TaskSchedule]
    workers: list[WorkerView]


class TaskApplications(Answer):
    """The applications whose workers have run within the last month, by namespace."""

    applications: list[TaskApplicationView]
