"""A bad network: passes datagrams on to a port, or loses them, and remembers them all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Lossy(asyncio.DatagramProtocol):
    """Stands at a port of its own before the port of a host. `loss` is the share that does not arrive."""

    def __init__(self, port: int, loss: float = 0.0) -> None:
        self._target = ("127.0.0.1", port)
        self._chance = random.Random(port)
        self._transport: asyncio.DatagramTransport | None = None
        self.loss = loss
        self.port = 0
        self.seen: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.DatagramTransport)
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.seen.append(data)
        if self._chance.random() >= self.loss:
            self.send(data)

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.sendto(data, self._target)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def lossy(port: int, loss: float = 0.0) -> AsyncIterator[Lossy]:
    _, network = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Lossy(port, loss), local_addr=("127.0.0.1", 0)
    )
    try:
        yield network
    finally:
        network.close()
