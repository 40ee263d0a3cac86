"""Limits of what clients may take of a worker: connections, and bytes of requests and answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
from dataclasses import dataclass
from typing import Final

# What a worker opens besides connections of clients: to PostgreSQL, Redis and peers, and files of the spool.
_OTHER_FILES: Final = 256
_SMALL_BYTES: Final = 64 * 1024

# While unread responses fill the memory, a client that reads nothing is disconnected after this long.
FLOODED_SECONDS: Final = 3.0

log = logging.getLogger(__name__)


def raise_file_limit(connections: int, others: int = 0) -> int:
    """Raise the limit of open files to what `connections` need, and `others`; returns how many it then allows."""
    others += _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < connections + others:
        wanted = connections + others if hard == resource.RLIM_INFINITY else min(connections + others, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= connections + others:
        return connections
    room = max(1, soft - others)
    log.warning(
        "this process may open %d files (ulimit -n): it accepts %d connections instead of %d", soft, room, connections
    )
    return room


class OpenFiles:
    """Logs when this process can open nothing more: new connections are then dropped by the event loop, in silence."""

    def __init__(self) -> None:
        self._exhausted = False

    def check(self) -> None:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._exhausted:
                self._exhausted = True
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log.error(
                    "%s: this process may have %d (ulimit -n), and new connections are dropped", error.strerror, most
                )
            return
        if self._exhausted:
            self._exhausted = False
            log.warning("files can be opened again")


@dataclass(slots=True, eq=False)
class Address:
    """What the connections of one client address hold together."""

    connections: int = 0
    incoming: int = 0
    outgoing: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The most of everything, for one worker. 0: no limit."""

    connections: int = 0
    connections_per_address: int = 0
    incoming_bytes: int = 0
    outgoing_bytes: int = 0

    @property
    def incoming_bytes_per_address(self) -> int:
        # One client alone never takes the room of all others.
        return self.incoming_bytes // 2

    @property
    def outgoing_bytes_per_address(self) -> int:
        return self.outgoing_bytes // 2


class Budget:
    """What is held at present. What is taken has to be given back."""

    __slots__ = ("addresses", "alarm", "incoming", "incoming_alarm", "limits", "outgoing", "refused")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.addresses: dict[str, Address] = {}
        self.incoming = 0
        self.outgoing = 0
        self.alarm: float = limits.outgoing_bytes_per_address or math.inf
        """With fewer unread bytes of responses than this, no client has too many."""
        self.incoming_alarm: float = limits.incoming_bytes_per_address or math.inf
        """The same, of requests."""
        self.refused: dict[str, int] = {"connections": 0, "incoming": 0, "outgoing": 0}
        """How often something was refused, by what there was too much of."""

    def join(self, peer: str) -> Address:
        """A connection begins."""
        address = self.addresses.get(peer)
        if address is None:
            address = self.addresses[peer] = Address()
        address.connections += 1
        return address

    def leave(self, peer: str, address: Address) -> None:
        """It has ended."""
        address.connections -= 1
        if not address.connections:
            self.addresses.pop(peer, None)

    def take_in(self, address: Address, nbytes: int, own: int, *, whole: bool = False) -> bool:
        """Count bytes of a request that holds `own` by now; returns whether there was room for them.

        They are counted even if not. A request is refused for what others hold, too, and not for its size alone.
        """
        self.incoming += nbytes
        address.incoming += nbytes
        if self.incoming <= self.incoming_alarm:
            return True
        limits = self.limits
        return not (
            _is_crowded(self.incoming, own, limits.incoming_bytes, whole)
            or _is_crowded(address.incoming, own, limits.incoming_bytes_per_address, whole)
        )

    def give_back(self, address: Address, nbytes: int) -> None:
        self.incoming -= nbytes
        address.incoming -= nbytes

    @property
    def is_flooded(self) -> bool:
        """Whether clients leave too many bytes of answers unread: there is no room for more."""
        return bool(self.limits.outgoing_bytes) and self.outgoing > self.limits.outgoing_bytes

    def is_flooding(self, address: Address) -> bool:
        """Whether this address alone leaves too many unread."""
        return self.outgoing > self.alarm and address.outgoing > self.alarm


def _is_crowded(held: int, own: int, limit: int, whole: bool) -> bool:
    if own <= _SMALL_BYTES:
        # Large bodies that fill the room to its last byte leave some for small ones, and those that never end some for
        # those that have come as a whole.
        limit += limit // 4 if whole else limit // 8
    return held > limit and held - own > limit // 2


class Unsent:
    """Bytes written to one client that it has not read yet."""

    __slots__ = ("_address", "_budget", "nbytes")

    def __init__(self, budget: Budget, address: Address) -> None:
        self._budget = budget
        self._address = address
        self.nbytes = 0

    def set(self, nbytes: int) -> None:
        more = nbytes - self.nbytes
        if more:
            self.nbytes = nbytes
            self._budget.outgoing += more
            self._address.outgoing += more

    @property
    def is_too_much(self) -> bool:
        """Whether it is part of a flood, so that a client that reads nothing is not waited for."""
        return bool(self.nbytes) and (self._budget.is_flooded or self._budget.is_flooding(self._address))


class Unfinished:
    """What one client has sent so far of a message that has not come to its end."""

    __slots__ = ("_address", "_budget", "nbytes")

    def __init__(self, budget: Budget, address: Address) -> None:
        self._budget = budget
        self._address = address
        self.nbytes = 0

    def set(self, nbytes: int) -> bool:
        """Whether there is room for it, beside the bodies of requests."""
        more = nbytes - self.nbytes
        self.nbytes = nbytes
        if more < 0:
            self._budget.give_back(self._address, -more)
        if more <= 0 or self._budget.take_in(self._address, more, nbytes):
            return True
        self._budget.refused["incoming"] += 1
        return False


class Upgraded:
    """A connection that another protocol has taken over."""

    __slots__ = ("_since", "address", "peer", "unfinished", "unsent")

    def __init__(self, peer: str, address: Address, unsent: Unsent, unfinished: Unfinished, now: float) -> None:
        self.peer = peer
        self.address = address
        self.unsent = unsent
        self.unfinished = unfinished
        self._since = now

    def is_stuck(self, unsent: int, now: float) -> bool:
        """Whether its client has read nothing for long, while unread responses fill the memory."""
        if unsent != self.unsent.nbytes:
            self.unsent.set(unsent)
            self._since = now
        return self.unsent.is_too_much and now - self._since >= FLOODED_SECONDS


class Metered(asyncio.Protocol):
    """A protocol that tells how many bytes are unsent, and how many of incomplete requests it holds."""

    unsent: Unsent | None = None
    unfinished: Unfinished | None = None
