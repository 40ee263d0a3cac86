"""Structs of the route with the metrics of a host."""

from __future__ import annotations

from queen.wire.fields import Answer, Count


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
