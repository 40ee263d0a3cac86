"""Structs of the routes about applications of `queen.tasks`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from queen.wire.api.fields import Answer, Count, OptionalName, Query
from queen.wire.task_apps import FailedAttempt, RunningJob, TaskDeclaration, TaskSchedule, TaskWork


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
    """A worker that is alive: it was heard of within the last half minute."""

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
