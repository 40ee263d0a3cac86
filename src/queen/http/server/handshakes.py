"""Accepting TLS connections: how many handshakes may be under way at the same time.

A connection is counted with those of its address once it has a protocol, which is after its handshake. `create_server`
sets no limit to those before it: clients that connect and say nothing would take 50 KB and a descriptor each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

MOST_HANDSHAKES: Final = 256
_HANDSHAKE_SECONDS: Final = 10.0
_ACCEPTED_AT_A_TIME: Final = 64
# Without descriptors, accepting again at once would keep the loop busy.
_PAUSE_SECONDS: Final = 1.0

log = logging.getLogger(__name__)


class TlsListener:
    """Accepts connections on sockets that are bound. The oldest handshake is dropped where there are too many."""

    def __init__(
        self,
        bound: Sequence[Any],
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.BaseProtocol],
        on_dropped: Callable[[], None],
    ) -> None:
        """`protocol` makes one for a connection whose handshake is done."""
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._protocol = protocol
        self._on_dropped = on_dropped
        self._pending: dict[socket.socket, str] = {}
        self._of_address: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets = [one.dup() for one in bound]
        for one in self._sockets:
            one.setblocking(False)
            one.listen(2048)
            self._loop.add_reader(one, self._accept, one)

    def close(self) -> None:
        """Accept nothing more; handshakes that are under way are dropped."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            self._loop.remove_reader(one)
            one.close()
        for connection in list(self._pending):
            self._drop(connection)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_A_TIME):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # `OpenFiles` says so in the log.
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_SECONDS, self._go_on, listening)
                return
            self._begin(connection, str(address[0]) if isinstance(address, tuple) else "local")

    def _go_on(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _begin(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._pending) >= MOST_HANDSHAKES:
            self._make_room(peer)
        self._pending[connection] = peer
        self._of_address[peer] += 1
        task = self._loop.create_task(self._shake_hands(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
            )
        except (OSError, TimeoutError) as error:
            log.debug("TLS handshake failed: %s", error)
        finally:
            self._forget(connection)

    def _make_room(self, peer: str) -> None:
        # An address that has most of them makes room for itself, and not at the cost of others.
        alone = self._of_address[peer] > MOST_HANDSHAKES // 2
        self._drop(next(one for one, of in self._pending.items() if not alone or of == peer))
        self._on_dropped()

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        # Closing it is left to its transport, which finds its end.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _forget(self, connection: socket.socket) -> None:
        peer = self._pending.pop(connection, None)
        if peer is None:
            return
        self._of_address[peer] -= 1
        if not self._of_address[peer]:
            del self._of_address[peer]
