"""Membership: the other hosts, by their heartbeats."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from queen.bus.packets import Heartbeat, Packet


@dataclass(slots=True)
class Traffic:
    """Counts since the worker started. `dropped`: packets received or not sent, by reason."""

    packets_sent: int = 0
    packets_received: int = 0
    packets_relayed: int = 0
    """Received by another worker of this host, and passed on by it."""
    events_sent: int = 0
    events_received: int = 0
    requests_sent: int = 0
    requests_failed: int = 0
    own: int = 0
    """Packets of this host itself, which was in its own list of peers."""
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class PeerStats:
    """The other hosts as one worker sees them now."""

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


log = logging.getLogger(__name__)

_REMEMBERED_SECONDS = 600.0
# Far more hosts than share a database: without a secret, hosts can be forged.
_MOST_SERVERS = 1000


@dataclass(slots=True)
class Server:
    """A host that has sent packets since it was started."""

    name: str
    first_at: float
    last_at: float
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Tracked:
    """How many hosts are known, and in what state."""

    tracked: int
    alive: int
    dead: int


class Members:
    """Tracks hosts by the random number that each draws at its start. All times are of one monotonic clock."""

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        self._servers: dict[int, Server] = {}
        self.heartbeats = 0
        self.restarts = 0

    def received(self, packet: Packet, now: float) -> None:
        """Any packet shows that its host is alive; a heartbeat makes a host known."""
        heartbeat = packet.heartbeat
        server = self._servers.get(packet.boot)
        if heartbeat is not None:
            self.heartbeats += 1
            if server is None and len(self._servers) < _MOST_SERVERS:
                server = self._meet(packet.boot, heartbeat, now)
        if server is None:
            return
        server.last_at = now
        leaving = heartbeat is not None and heartbeat.leaving
        if leaving == server.alive:
            server.alive = not leaving
            log.info("host %s %s", server.name, "has stopped" if leaving else "is alive again")

    def settle(self, now: float) -> None:
        """Mark hosts dead that send nothing. One whose name came up again since has been restarted."""
        newest: dict[str, float] = {}
        for server in self._servers.values():
            newest[server.name] = max(server.first_at, newest.get(server.name, server.first_at))
        for boot, server in list(self._servers.items()):
            idle = now - server.last_at
            if server.alive and idle > self._dead_after:
                server.alive = False
                log.warning("host %s is dead: no packet for %.1f s", server.name, idle)
            if server.alive:
                continue
            if newest[server.name] > server.first_at:
                self.restarts += 1
                del self._servers[boot]
            elif idle > _REMEMBERED_SECONDS:
                del self._servers[boot]

    def count(self, now: float) -> Tracked:
        self.settle(now)
        alive = sum(server.alive for server in self._servers.values())
        return Tracked(len(self._servers), alive, len(self._servers) - alive)

    def _meet(self, boot: int, heartbeat: Heartbeat, now: float) -> Server:
        server = self._servers[boot] = Server(heartbeat.name, now, now, alive=not heartbeat.leaving)
        log.info("host %s joined", server.name)
        return server
