"""Descriptions of status, analytics and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from queen.http.openapi.operation import (
    DATABASE,
    FOUND,
    Answer,
    Count,
    Media,
    Name,
    Operation,
    Pagination,
    Parameter,
    Time,
    Uuid,
    paging,
)
from queen.http.operations.queues import QueueInList

_TAG: Final = "Status"

_TIMES: Final = (
    Parameter("from", "From this time on.", Time),
    Parameter("to", "Until this time.", Time),
)
_QUEUE: Final = Parameter("queue", "Only of this queue.", Name)
_FILTER: Final = (
    _QUEUE,
    Parameter("namespace", "Only of queues of this namespace.", Name),
    Parameter("task", "Only of queues of this task.", Name),
)
_WORKER: Final = (
    Parameter("hostname", "Only of this host.", str),
    Parameter("workerId", "Only of this worker.", Annotated[int, Meta(ge=0)]),
)


class QueueStatusList(Answer):
    """A page of queues, newest first; here `pending` includes what is being processed."""

    queues: list[QueueInList]
    pagination: Pagination


class QueueMessage(Answer):
    """A message of a queue."""

    id: Uuid
    transaction_id: str | None
    partition_id: Uuid
    queue_path: str
    queue: str
    partition: str
    status: str
    created_at: Time


class DataPoint(Answer):
    """How many messages came from this time on."""

    timestamp: Time
    messages: Count


class StoredByTime(Answer, rename={"data_points": "dataPoints", "since": "from", "until": "to"}):
    """How many of the messages that are still stored came when."""

    data_points: list[DataPoint]
    interval: str
    since: Time
    until: Time


def _series(id: str, summary: str, parameters: tuple[Parameter, ...], kind: Any = dict[str, Any]) -> Operation:
    return Operation(id=id, summary=summary, tag=_TAG, parameters=parameters, answers={200: kind}, errors=DATABASE)


OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/status": _series("status", "Throughput, messages, leases, workers and errors", (*_TIMES, *_FILTER)),
    "GET /api/v1/status/queues": Operation(
        id="queueStatuses",
        summary="How queues are",
        tag=_TAG,
        parameters=(*_FILTER[1:], *paging(100)),
        answers={200: QueueStatusList},
        errors=DATABASE,
    ),
    "GET /api/v1/status/queues/{queue}": Operation(
        id="queueStatus", summary="How a queue is", tag=_TAG, answers={200: dict[str, Any]}, errors=FOUND
    ),
    "GET /api/v1/status/queues/{queue}/messages": Operation(
        id="queueMessages",
        summary="The messages of a queue, newest first",
        tag=_TAG,
        parameters=paging(50),
        answers={200: list[QueueMessage]},
        errors=FOUND,
    ),
    "GET /api/v1/status/analytics": Operation(
        id="storedByTime",
        summary="How many messages came when",
        tag=_TAG,
        parameters=(
            *_TIMES,
            *_FILTER,
            Parameter("interval", "The length of one step.", Literal["minute", "hour", "day"], "hour"),
        ),
        answers={200: StoredByTime},
        errors=DATABASE,
    ),
    "GET /api/v1/analytics/system-metrics": _series("systemMetrics", "CPU, memory and pools", (*_TIMES, *_WORKER)),
    "GET /api/v1/analytics/worker-metrics": _series("workerMetrics", "What workers did", (*_TIMES, *_WORKER)),
    "GET /api/v1/analytics/queue-lag": _series(
        "queueLag", "How old messages were when they were taken", (*_TIMES, _QUEUE), list[dict[str, Any]]
    ),
    "GET /api/v1/analytics/queue-ops": _series("queueOperations", "What happened to queues", (*_TIMES, _QUEUE)),
    "GET /api/v1/analytics/queue-parked-replicas": _series("parkedPops", "Pops that wait", (*_TIMES, _QUEUE)),
    "GET /api/v1/analytics/retention": _series("retentionHistory", "What was removed", (*_TIMES, _QUEUE)),
    "GET /api/v1/analytics/postgres-stats": _series("postgresStats", "How PostgreSQL is", ()),
    "GET /metrics": Operation(
        id="metrics", summary="A few numbers", tag=_TAG, answers={200: dict[str, Any]}, errors=DATABASE
    ),
    "GET /metrics/prometheus": Operation(
        id="prometheus",
        summary="Everything that is counted, for Prometheus",
        tag=_TAG,
        answers={200: Media("text/plain")},
        errors=DATABASE,
    ),
}
