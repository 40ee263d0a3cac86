"""Descriptions of maintenance and of what waits in the spool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import field

from queen.http.openapi.operation import DATABASE, Answer, Body, Count, Operation

_TAG: Final = "System"


class Switch(Body):
    """On or off."""

    enabled: bool


class FailedFiles(Answer):
    """Records that were refused and set aside."""

    count: Count
    total_bytes: Count
    total_megabytes: float = field(name="totalMB")
    failover_count: Count
    qos0_count: Count


class BufferStats(Answer):
    """The spool of the host that answered."""

    pending_count: Count
    failed_count: Count
    db_healthy: bool
    pending_bytes: Count
    oldest_seconds: float
    failed_files: FailedFiles


class Maintenance(Answer):
    """The modes of the whole system, and the spool of the host that answered."""

    maintenance_mode: bool
    pop_maintenance_mode: bool
    buffered_messages: Count
    buffer_healthy: bool
    buffer_stats: BufferStats


class PushMaintenance(Answer):
    """Push maintenance as it is now."""

    maintenance_mode: bool
    buffered_messages: Count
    buffer_healthy: bool
    message: str


class PopMaintenance(Answer):
    """Pop maintenance as it is now."""

    pop_maintenance_mode: bool
    message: str


class Buffers(Answer):
    """What waits in the spool of the host that answered."""

    pending: Count
    failed: Count
    db_healthy: bool
    worker: Count


OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /api/v1/system/maintenance": Operation(
        id="maintenance",
        summary="Which maintenance modes are on, and what waits",
        tag=_TAG,
        answers={200: Maintenance},
    ),
    "POST /api/v1/system/maintenance": Operation(
        id="switchMaintenance",
        summary="Switch push maintenance",
        description="While it is on, pushes are kept on disk and answered `buffered`; when it is switched off they go "
        "to PostgreSQL, in order. Holds for every server of the database, and across restarts.",
        tag=_TAG,
        body=Switch,
        body_example={"enabled": True},
        answers={200: PushMaintenance},
        errors=DATABASE,
    ),
    "GET /api/v1/system/maintenance/pop": Operation(
        id="popMaintenance",
        summary="Whether pop maintenance is on",
        tag=_TAG,
        answers={200: PopMaintenance},
    ),
    "POST /api/v1/system/maintenance/pop": Operation(
        id="switchPopMaintenance",
        summary="Switch pop maintenance",
        description="While it is on, pops are answered empty at once. Pushes go on.",
        tag=_TAG,
        body=Switch,
        body_example={"enabled": True},
        answers={200: PopMaintenance},
        errors=DATABASE,
    ),
    "GET /api/v1/status/buffers": Operation(
        id="buffers",
        summary="What waits in the spool of this host",
        tag="Status",
        answers={200: Buffers},
        example={"pending": 0, "failed": 0, "dbHealthy": True, "worker": 0},
    ),
}
