"""Datagrams to other hosts: at once, and without any promise to arrive."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from queen.cluster.addresses import Address
from queen.cluster.stats import Traffic

log = logging.getLogger(__name__)

# What fits the frames of most networks in one piece.
DATAGRAM_BYTES = 1400
_BUFFER_BYTES = 1 << 20
_MOST_AT_ONCE = 256


class UdpSocket:
    """Sends from a port of its own, and receives on the port of the host when told to listen."""

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
        """Take the port of the host; False while somebody else has it."""
        if self._listener is not None:
            return True
        # Nobody shares it: what a second listener took would be lost to this one.
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
                    "UDP port %d of %s cannot be had (%s): this host hears of other hosts late;"
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
            # A full buffer, no way to that network: the slow poll of the other host makes up for it.
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
                log.debug("receiving a datagram failed: %s", error)
                return
            self._receive(frame)
