"""A consumer on a WebSocket as tests use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.support.api import Api

PATH = "/ws/v1/consume"


class Consumer:
    """One connection; what comes in is read frame by frame."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._requests = 0

    async def send(self, type: str, **fields: Any) -> None:
        await self.socket.send_json({"type": type, **fields})

    async def next(self, type: str | None = None, patience: float = 10.0) -> dict[str, Any]:
        """The next frame, which has to be of a type."""
        async with asyncio.timeout(patience):
            frame: dict[str, Any] = await self.socket.receive_json()
        assert type is None or frame["type"] == type, frame
        return frame

    async def nothing(self, seconds: float = 0.2) -> None:
        """Nothing comes in for a while."""
        try:
            # The time-out of `receive` begins anew with every ping.
            async with asyncio.timeout(seconds):
                frame = await self.socket.receive()
        except TimeoutError:
            return
        raise AssertionError(f"something came: {frame}")

    async def subscribe(self, queue: str, id: str = "s", **fields: Any) -> dict[str, Any]:
        await self.send("subscribe", id=id, queue=queue, **fields)
        return await self.next("subscribed")

    async def ask(self, type: str, **fields: Any) -> dict[str, Any]:
        """Send a request with an id of its own, and take the next frame for its answer."""
        self._requests += 1
        await self.send(type, id=self._requests, **fields)
        answer = await self.next()
        assert answer["id"] == self._requests, answer
        return answer

    async def batch(self, id: str = "s") -> list[dict[str, Any]]:
        """The messages of the next frame, which has to be a batch of a subscription."""
        frame = await self.next("batch")
        assert frame["id"] == id, frame
        messages: list[dict[str, Any]] = frame["messages"]
        return messages

    async def ack(self, messages: Sequence[dict[str, Any]], type: str = "ack", **fields: Any) -> list[dict[str, Any]]:
        """Ack messages; returns the results."""
        answer = await self.ask(type, acknowledgments=acknowledgments(messages), **fields)
        assert answer["type"] == "acked", answer
        results: list[dict[str, Any]] = answer["results"]
        return results

    async def closed(self) -> int | None:
        """Wait for the close, whatever else comes before; returns its code."""
        async with asyncio.timeout(100):
            while (await self.socket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
        return self.socket.close_code


def acknowledgments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: message[key] for key in ("transactionId", "partitionId", "leaseId")} for message in messages]


@asynccontextmanager
async def consuming(api: Api | str, **options: Any) -> AsyncIterator[Consumer]:
    """A connection to a server; `options` are those of aiohttp."""
    url = api if isinstance(api, str) else api.url
    async with aiohttp.ClientSession() as session, session.ws_connect(url + PATH, **options) as socket:
        yield Consumer(socket)
