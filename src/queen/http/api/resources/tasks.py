"""Applications of `queen.tasks`: their tasks, jobs by state, and workers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from queen.http.routing.call import Call
from queen.http.routing.context import Api
from queen.http.routing.route import DATABASE, RouteTable
from queen.http.server.message import Access
from queen.storage.database import Record
from queen.wire.api.resources.tasks import (
    APPLICATION_KEY,
    WORKER_PREFIX,
    TaskApplication,
    TaskApplications,
    TaskApplicationsQuery,
    TaskApplicationView,
    TaskDeclaration,
    TaskView,
    WorkerReport,
    WorkerView,
)
from queen.wire.api.resources.topics import TopicCounts

routes = RouteTable("Tasks")

_application = msgspec.json.Decoder(TaskApplication)
_report = msgspec.json.Decoder(WorkerReport)


@routes.on_worker(
    "GET",
    "/api/v1/tasks",
    access=Access.READ_ONLY,
    id="taskApplications",
    summary="Applications of queen.tasks, their tasks and workers",
    description="Jobs are items of the topic of their task: peek there, and at its dead letters, to see them.",
    query=TaskApplicationsQuery,
    returns={200: TaskApplications},
    errors=DATABASE,
)
async def list_applications(api: Api, call: Call[TaskApplicationsQuery, None]) -> TaskApplications:
    """Keys of an application are on one shard, and its topics may be on any."""
    namespace = call.query.namespace
    found: dict[str, TaskApplication] = {}
    workers: dict[str, list[WorkerView]] = defaultdict(list)
    for rows in await asyncio.gather(
        *(broker.database.fetch("task_app_keys", namespace, APPLICATION_KEY, WORKER_PREFIX) for broker in api.brokers)
    ):
        for row in rows:
            # Anyone may write such keys; what is not a worker's is not shown.
            try:
                if row["key"] == APPLICATION_KEY:
                    found[row["namespace"]] = _application.decode(row["value"])
                else:
                    workers[row["namespace"]].append(_worker(row))
            except msgspec.DecodeError:
                continue
    return TaskApplications(
        [
            TaskApplicationView(
                name,
                _tasks(found[name].tasks, await _counts(api, name), workers[name]),
                found[name].schedules,
                workers[name],
            )
            for name in sorted(found)
        ]
    )


def _worker(row: Record) -> WorkerView:
    report = _report.decode(row["value"])
    return WorkerView(
        id=row["key"].removeprefix(WORKER_PREFIX), seen_at=row["updated_at"], **msgspec.structs.asdict(report)
    )


async def _counts(api: Api, namespace: str) -> dict[str, TopicCounts]:
    of_shards = await asyncio.gather(*(broker.topics.admin.counts(namespace, None) for broker in api.brokers))
    return {one.topic: one for counts in of_shards for one in counts}


def _tasks(
    declared: Sequence[TaskDeclaration], counts: Mapping[str, TopicCounts], workers: Sequence[WorkerView]
) -> list[TaskView]:
    views: dict[str, TaskView] = {}
    for one in declared:
        view = views[one.task] = TaskView(**msgspec.structs.asdict(one))
        counted = counts.get(one.topic)
        if counted is not None:
            view.ready, view.delayed, view.leased = counted.ready, counted.delayed, counted.leased
            view.dead, view.paused = counted.dead, counted.paused
    seconds: dict[str, float] = defaultdict(float)
    for worker in workers:
        for work in worker.tasks:
            known = views.get(work.task)
            if known is not None:
                known.workers += 1
                known.running += work.running
                known.done += work.done
                known.failed += work.failed
                known.done_per_minute += work.done_per_minute
                known.failed_per_minute += work.failed_per_minute
                seconds[work.task] += work.seconds
    for name, view in views.items():
        if view.done:
            view.mean_seconds = seconds[name] / view.done
    return list(views.values())
