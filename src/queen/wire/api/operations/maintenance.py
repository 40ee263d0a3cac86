"""Structs of the routes about maintenance and the spool."""

from __future__ import annotations

from msgspec import field

from queen.errors import BadRequest
from queen.wire.decode import decode_fields
from queen.wire.fields import Answer, Body, Count


class Switch(Body):
    """On or off."""

    enabled: bool


def decode_switch(body: bytes) -> Switch:
    enabled = decode_fields(body, Switch).get("enabled")
    if not isinstance(enabled, bool):
        raise BadRequest("enabled (boolean) is required")
    return Switch(enabled)


class FailedFiles(Answer):
    """Records that were refused and quarantined."""

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
    """Messages in the spool of the host that answered."""

    pending: Count
    failed: Count
    db_healthy: bool
    worker: Count
