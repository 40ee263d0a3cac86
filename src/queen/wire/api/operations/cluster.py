"""Structs of the routes about other hosts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from queen.wire.fields import Body, Count, Name, SnakeAnswer


class Wake(Body):
    """The queue, or the partition of it, whose waiting pops look for messages."""

    queue: Name
    partition: Name | None = None


class Received(SnakeAnswer):
    """That a request or packet was taken in; `self`: it was sent by this host."""

    status: str
    self: bool | msgspec.UnsetType = msgspec.UNSET


class Transport(SnakeAnswer):
    """The transport to other hosts, and its counters."""

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
    """The cache of queue configurations of this worker."""

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
    """The state that this worker shares with other hosts."""

    enabled: bool
    running: bool
    server_id: str
    transport: Transport
    queue_config_cache: QueueConfigCache
    server_health: ServerHealth
    maintenance_mode: bool
    pop_maintenance_mode: bool
