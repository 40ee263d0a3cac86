"""Datagrams to other hosts: at once, and without any promise to arrive."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from queen.bus.members import Traffic
from queen.files import try_lock
from queen.setting_kinds import split_host_port

log = logging.getLogger(__name__)

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[tuple[socket.AddressFamily, str]]]]

_LOOK_UP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A place datagrams are sent to."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AddressBook:
    """The addresses of peers given as `host` or `host:port`. A name with several addresses stands for all of them."""

    def __init__(self, peers: Sequence[str], default_port: int, resolve: Resolve | None = None) -> None:
        self._resolve = resolve or _resolve
        self._peers = [(host, port or default_port) for host, port in map(split_host_port, peers)]
        self._found: dict[tuple[str, int], list[Address]] = {}
        self._failing: set[tuple[str, int]] = set()
        self.addresses: tuple[Address, ...] = ()

    async def keep_up(self) -> None:
        """Look all names up, forever."""
        while True:
            await self.look_up()
            await asyncio.sleep(_LOOK_UP_SECONDS)

    async def look_up(self) -> None:
        await asyncio.gather(*(self._look_up(*peer) for peer in self._peers))
        # The same place may have several names.
        self.addresses = tuple(dict.fromkeys(address for peer in self._peers for address in self._found.get(peer, ())))

    async def _look_up(self, host: str, port: int) -> None:
        peer = (host, port)
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            # What it was is kept: an answer that fails says nothing about the host.
            if peer not in self._failing:
                log.warning("name of peer %s could not be resolved: %s; retrying", host, error)
                self._failing.add(peer)
            return
        self._failing.discard(peer)
        places = sorted((Address(family, place, port) for family, place in found), key=str)
        # One way to reach it is enough.
        preferred = [place for place in places if place.family == socket.AF_INET] or places
        if preferred != self._found.get(peer):
            log.info("peer %s resolved to %s", host, ", ".join(map(str, preferred)))
            self._found[peer] = preferred


async def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    return [(family, str(where[0])) for family, _, _, _, where in found]


class UdpLeader:
    """A lock over the workers that share a directory. The kernel frees it when its holder dies."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "udp-leader.lock"
        self._file: int | None = None
        self.elected = False

    def try_acquire(self) -> bool:
        """Whether this worker is the one; asks for the lock if it is not."""
        if self.elected:
            return True
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                # The supervisor has died, another worker has removed the directory, and this one is about to end.
                return False
        self.elected = try_lock(self._file)
        return self.elected

    def close(self) -> None:
        self.elected = False
        if self._file is not None:
            os.close(self._file)
            self._file = None


# What fits the frames of most networks in one piece.
DATAGRAM_BYTES = 1400
_BUFFER_BYTES = 1 << 20
_MOST_AT_ONCE = 256


class UdpSocket:
    """Sends from a port of its own, and receives on the port of the host once it listens."""

    def __init__(self, host: str, port: int, receive: Callable[[bytes], None], traffic: Traffic) -> None:
        self._host = host
        self._port = port
        self._receive = receive
        self._traffic = traffic
        self._senders: dict[socket.AddressFamily, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._complained = False

    @property
    def listening(self) -> bool:
        return self._listener is not None

    def listen(self) -> bool:
        """Bind the port of the host; False while another process has it."""
        if self._listener is not None:
            return True
        # Not shared: a second listener would take datagrams from this one.
        listener = self._open(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((self._host, self._port))
        except OSError as error:
            listener.close()
            if not self._complained:
                self._complained = True
                log.error(
                    "UDP port %d of %s could not be bound (%s): notifications of other hosts are not received;"
                    " free the port, or set QUEEN_UDP_NOTIFY_PORT",
                    self._port,
                    self._host,
                    error,
                )
            return False
        self._complained = False
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._drain, listener)
        return True

    def send(self, frame: bytes, address: Address) -> None:
        """Hand a datagram to the kernel; what it does not take is dropped and counted."""
        sender = self._senders.get(address.family)
        if sender is None:
            sender = self._senders[address.family] = self._open(address.family)
        try:
            sender.sendto(frame, (address.host, address.port))
        except OSError:
            # A full buffer, no way to that network: the safety poll of the other host makes up for it.
            self._traffic.dropped["unsendable"] += 1
            return
        self._traffic.packets_sent += 1

    def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _open(self, family: socket.AddressFamily) -> socket.socket:
        opened = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            opened.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        return opened

    def _drain(self, listener: socket.socket) -> None:
        # Not endlessly: others want the event loop too, and it calls again while something is there.
        for _ in range(_MOST_AT_ONCE):
            try:
                frame = listener.recv(65536)
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("datagram could not be received: %s", error)
                return
            self._receive(frame)
