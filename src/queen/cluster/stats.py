"""What a worker has sent to other hosts, heard from them, and dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Counts since the worker started. `dropped` is by reason, of packets that came in and of what could not go out."""

    packets_sent: int = 0
    packets_received: int = 0
    packets_relayed: int = 0
    """Received by another worker of this host, and passed on by it."""
    events_sent: int = 0
    events_received: int = 0
    requests_sent: int = 0
    requests_failed: int = 0
    own: int = 0
    """Packets of this very host, which was in its own list of peers."""
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class PeerStats:
    """A worker's view of the other hosts at one moment."""

    enabled: bool
    running: bool
    server_id: str
    transports: tuple[str, ...]
    listening: bool
    """Whether this is the worker that has the UDP port of its host."""
    servers_tracked: int
    servers_alive: int
    servers_dead: int
    heartbeats_received: int
    restarts_detected: int
    packets_sent: int
    packets_received: int
    packets_relayed: int
    events_sent: int
    events_received: int
    requests_sent: int
    requests_failed: int
    own: int
    dropped: dict[str, int]
