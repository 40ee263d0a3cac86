"""Descriptions of what servers tell each other, and of what they know of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from queen.http.openapi.operation import Body, Count, Media, Name, Operation, SnakeAnswer


class Notice(Body):
    """Where something may wait."""

    queue: Name
    partition: Name | msgspec.UnsetType | None = msgspec.UNSET


class Heard(SnakeAnswer):
    """That it was taken in."""

    status: str
    self: bool | msgspec.UnsetType = msgspec.UNSET


class Transport(SnakeAnswer):
    """How this worker reaches other hosts, and what went over it."""

    protocols: list[str]
    listening: bool
    messages_sent: Count
    messages_received: Count
    messages_dropped: Count
    dropped_by_reason: dict[str, Count]
    own: Count
    events_sent: Count
    events_received: Count
    requests_failed: Count


class QueueConfigCache(SnakeAnswer):
    """What this worker remembers of queues."""

    size: Count
    hits: Count
    misses: Count
    hit_rate: Annotated[float, Meta(ge=0, le=1)]


class ServerHealth(SnakeAnswer):
    """The other hosts, by their heartbeats."""

    servers_tracked: Count
    servers_alive: Count
    servers_dead: Count
    heartbeats_received: Count
    restarts_detected: Count


class SharedState(SnakeAnswer):
    """What this worker shares with other hosts, and knows of them."""

    enabled: bool
    running: bool
    server_id: str
    transport: Transport
    queue_config_cache: QueueConfigCache
    server_health: ServerHealth
    maintenance_mode: bool
    pop_maintenance_mode: bool


def _shared_state(id: str) -> Operation:
    return Operation(id=id, summary="What hosts know of each other", tag="System", answers={200: SharedState})


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /internal/api/notify": Operation(
        id="notify",
        summary="Wake waiting pops",
        description="Has parked pops of a queue, or of one partition, look for messages, on every host.",
        tag="System",
        body=Notice,
        answers={200: Heard},
        errors=(503,),
    ),
    "POST /internal/api/events": Operation(
        id="hostEvents",
        summary="What another host did",
        description="Packets of other hosts, signed with QUEEN_SYNC_SECRET where it is set.",
        tag="System",
        body=Media("application/octet-stream"),
        answers={200: Heard},
        errors=(401, 409),
    ),
    "GET /api/v1/system/shared-state": _shared_state("sharedState"),
    "GET /internal/api/shared-state/stats": _shared_state("sharedStateStats"),
    "GET /internal/api/inter-instance/stats": _shared_state("interInstanceStats"),
}
