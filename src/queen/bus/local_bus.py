"""Datagrams among the workers of one host, over unix sockets: ordered, never lost while both ends live."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

_LARGEST = 60_000
_MOST_QUEUED = 10_000


class LocalBus:
    """Sends each datagram to every other of the `workers` that share a directory."""

    def __init__(self, directory: Path, worker_id: int, workers: int, receive: Callable[[bytes], None]) -> None:
        self._path = _socket_path(directory, worker_id)
        self._receive = receive
        self._socket: socket.socket | None = None
        self._peers: dict[str, deque[bytes]] = {
            str(_socket_path(directory, peer)): deque() for peer in range(workers) if peer != worker_id
        }
        self.dropped = 0
        """Datagrams that another worker was too busy for, or that could not be sent."""

    largest = _LARGEST

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        self._socket.bind(str(self._path))
        asyncio.get_running_loop().add_reader(self._socket, self.drain)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        self._path.unlink(missing_ok=True)

    def send(self, datagram: bytes) -> None:
        """Give a datagram (at most `largest` bytes) to every other worker."""
        for peer, backlog in self._peers.items():
            if backlog or not self._try_send(peer, datagram):
                self._queue(backlog, datagram)

    def hint(self, datagram: bytes) -> None:
        """Send a datagram to the other workers that can take it now: late it is of no use, or misleads."""
        for peer, backlog in self._peers.items():
            if backlog or not self._try_send(peer, datagram):
                self.dropped += 1

    def drain(self) -> None:
        """Take in everything that has arrived. Also called before a pop concludes that nothing is there."""
        if self._socket is None:
            return
        while True:
            try:
                datagram = self._socket.recv(65536)
            except BlockingIOError:
                return
            try:
                self._receive(datagram)
            except Exception:
                # A push, pop or ack reads what others sent, and must not fail because of it.
                log.exception("datagram of %d bytes from another worker could not be handled", len(datagram))

    def _try_send(self, peer: str, datagram: bytes) -> bool:
        """Whether the datagram needs no further attempt: it was taken, or there is no process to take it."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(datagram, peer)
        except BlockingIOError:
            return False
        except (ConnectionRefusedError, FileNotFoundError):
            # The socket of a worker that died; it reads the state from PostgreSQL when it comes back.
            return True
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return False
            self.dropped += 1
            log.error("datagram of %d bytes could not be sent to %s: %s", len(datagram), peer, error)
            return True
        return True

    def _queue(self, backlog: deque[bytes], datagram: bytes) -> None:
        """Keep what a busy worker could not take yet; the safety poll makes up for what is dropped beyond that."""
        if len(backlog) >= _MOST_QUEUED:
            backlog.popleft()
            self.dropped += 1
        if not backlog:
            asyncio.get_running_loop().call_later(0.002, self._flush)
        backlog.append(datagram)

    def _flush(self) -> None:
        waiting = False
        for peer, backlog in self._peers.items():
            while backlog and self._try_send(peer, backlog[0]):
                backlog.popleft()
            waiting = waiting or bool(backlog)
        if waiting and self._socket is not None:
            asyncio.get_running_loop().call_later(0.002, self._flush)


def _socket_path(directory: Path, worker_id: int) -> Path:
    return directory / f"worker-{worker_id}.sock"
