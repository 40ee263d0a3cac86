"""A bad network: passes datagrams on to a port, or loses them, and remembers them all."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager


class Lossy:
    """Stands at a port of its own before the port of a host. `loss` is the share that does not arrive."""

    def __init__(self, port: int, loss: float = 0.0) -> None:
        self._target = ("127.0.0.1", port)
        self._chance = random.Random(port)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(("127.0.0.1", 0))
        asyncio.get_running_loop().add_reader(self._socket, self._pass_on)
        self.loss = loss
        self.port: int = self._socket.getsockname()[1]
        self.seen: list[bytes] = []
        self.lost = 0

    def send(self, data: bytes) -> None:
        self._socket.sendto(data, self._target)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _pass_on(self) -> None:
        data = self._socket.recv(65536)
        self.seen.append(data)
        if self._chance.random() >= self.loss:
            self.send(data)
        else:
            self.lost += 1


@contextmanager
def lossy(port: int, loss: float = 0.0) -> Iterator[Lossy]:
    network = Lossy(port, loss)
    try:
        yield network
    finally:
        network.close()
