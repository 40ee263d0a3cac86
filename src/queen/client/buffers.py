"""All buffers of a client, one for each partition that is pushed to through one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from queen.client.buffer import Buffer, BufferCounts
from queen.client.errors import ClientClosedError, QueenError, UnsentError, UnsentMessage
from queen.client.http import HttpClient
from queen.client.log import ClientLog
from queen.client.messages import BufferOptions, BufferStats


class Buffers:
    """Opens a buffer when a partition is first pushed to, and forgets it when it is empty."""

    def __init__(self, http: HttpClient, log: ClientLog, on_open: Callable[[], object]) -> None:
        self._http = http
        self._on_open = on_open
        self._log = log
        self._counts = BufferCounts()
        self._open: dict[tuple[str, str], Buffer] = {}
        self._closed = False

    def open(self, queue: str, partition: str, options: BufferOptions) -> Buffer:
        """The buffer of a partition; the options of the push that opens it hold until it is empty."""
        buffer = self._open.get((queue, partition))
        if buffer is None:
            if self._closed:
                raise ClientClosedError("this Queen client was closed; make a new one")
            buffer = Buffer(queue, partition, options, self._http, self._log, self._counts, self._forget)
            self._open[queue, partition] = buffer
            self._on_open()
        return buffer

    async def add_when_there_is_room(self, queue: str, partition: str, options: BufferOptions, item: bytes) -> None:
        """Wait until the buffer has room, and add the item."""
        while (buffer := self.open(queue, partition, options)).is_full:
            await buffer.wait_for_room()
        if buffer.add(item):
            await buffer.begin_sending()

    async def flush(self, queue: str, partition: str) -> None:
        """Send what the buffer of one partition holds; raises when that cannot be done, and keeps it."""
        buffer = self._open.get((queue, partition))
        if buffer is not None:
            await self._flush([buffer])

    async def flush_all(self) -> None:
        """Send what all buffers hold; raises when that cannot be done, and keeps it."""
        await self._flush(list(self._open.values()))

    async def close(self) -> list[UnsentMessage]:
        """Send what can be sent, and return what cannot."""
        self._closed = True
        buffers = list(self._open.values())
        await asyncio.gather(*(buffer.flush() for buffer in buffers), return_exceptions=True)
        unsent = [message for buffer in buffers for message in await buffer.close()]
        self._open.clear()
        return unsent

    def stats(self) -> BufferStats:
        buffers = self._open.values()
        return {
            "activeBuffers": len(buffers),
            "totalBufferedMessages": sum(len(buffer) for buffer in buffers),
            "oldestBufferAge": max((buffer.age_millis for buffer in buffers), default=0.0),
            "flushesPerformed": self._counts.flushes,
            "failedFlushes": self._counts.failures,
            "rejectedMessages": sum(buffer.rejected for buffer in buffers),
        }

    async def _flush(self, buffers: list[Buffer]) -> None:
        outcomes = await asyncio.gather(*(buffer.flush() for buffer in buffers), return_exceptions=True)
        rejected = [message for buffer in buffers for message in buffer.take_rejected()]
        for buffer in buffers:
            self._forget(buffer)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, QueenError):
                raise outcome
        if rejected:
            raise UnsentError(rejected)
        for outcome in outcomes:
            if isinstance(outcome, QueenError):
                raise outcome

    def _forget(self, buffer: Buffer) -> None:
        if not len(buffer) and not buffer.rejected and self._open.get((buffer.queue, buffer.partition)) is buffer:
            del self._open[buffer.queue, buffer.partition]
