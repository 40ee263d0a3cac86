"""Descriptions of the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from queen.http.openapi.operation import Answer, Count, Media, Operation

_TAG: Final = "Status"


class Rate(Answer):
    """How many since the start, and per second over the last minute."""

    total: Count
    rate: float


class Connections(Answer):
    """Connections of the pools, and requests that wait for their database call."""

    pool_size: Count
    idle_connections: Count
    waiting_requests: Count


class MemoryUse(Answer):
    """Bytes; all but `rss` are always 0."""

    rss: Count
    heap_total: Count
    heap_used: Count
    external: Count
    array_buffers: Count


class CpuUse(Answer):
    """Microseconds since the start."""

    user: Count
    system: Count


class HostMetrics(Answer):
    """This host in short; `uptime` is in seconds."""

    uptime: float
    requests: Rate
    messages: Rate
    database: Connections
    memory: MemoryUse
    cpu: CpuUse


OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /metrics": Operation(id="metrics", summary="This host in short", tag=_TAG, answers={200: HostMetrics}),
    "GET /metrics/prometheus": Operation(
        id="prometheus",
        summary="Everything, for Prometheus",
        description="Whichever worker answers speaks for all workers of its host.",
        tag=_TAG,
        answers={200: Media("text/plain")},
    ),
}
