"""Client-side buffers: the messages of a partition are collected, bounded, and sent in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from queen.client.config import BUFFER_DEFAULTS, ClientLog
from queen.client.errors import (
    AuthError,
    ClientClosedError,
    OverloadedError,
    PushError,
    QueenConnectionError,
    QueenError,
    RequestError,
    ServerError,
    UnsentError,
    UnsentMessage,
)
from queen.client.http import HttpClient, decode_as
from queen.client.types import BufferOptions, BufferStats

_MAX_REQUEST_MESSAGES = 1000
_MAX_REQUEST_BYTES = 4 * 1024 * 1024

# Failed flushes that are retried: these errors end without a change of the messages. Any other would repeat forever.
_RETRIED = (QueenConnectionError, OverloadedError, ServerError, AuthError, PushError)


class _Result(msgspec.Struct):
    status: str = ""
    error: str | None = None


class _Buffered(msgspec.Struct):
    queue: str
    partition: str
    payload: object
    transaction_id: object = msgspec.field(name="transactionId")


_results = msgspec.json.Decoder(list[_Result])
_buffered = msgspec.json.Decoder(_Buffered)


@dataclass(slots=True)
class BufferCounts:
    """Counters over all buffers of a client."""

    flushes: int = 0
    failures: int = 0


@dataclass(slots=True)
class _FlushWaiter:
    """A `flush()` that waits until the messages up to a sequence number are sent."""

    until: int
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Buffer:
    """Flushes when it holds `message_count` messages, or when the oldest has waited `time_millis`.

    A message is removed when the server has accepted it. While the server is unavailable messages stay, and at
    `max_messages` or `max_bytes` pushes wait. One request is in flight at a time, which keeps the order.
    """

    def __init__(
        self,
        queue: str,
        partition: str,
        options: BufferOptions,
        http: HttpClient,
        log: ClientLog,
        counts: BufferCounts,
        on_empty: Callable[[Buffer], object],
    ) -> None:
        self.queue = queue
        self.partition = partition
        self._http = http
        self._log = log
        self._counts = counts
        self._on_empty = on_empty
        self._message_count = _positive(options, "message_count")
        self._seconds = _positive(options, "time_millis") / 1000
        self._max_messages = max(_positive(options, "max_messages"), self._message_count)
        self._max_bytes = _positive(options, "max_bytes")
        self._items: deque[bytes] = deque()
        self._held_bytes = 0
        self._due = 0
        self._added = 0
        self._sent = 0
        self._first_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sender: asyncio.Task[None] | None = None
        self._flush_requested = asyncio.Event()
        self._space_waiters: list[asyncio.Future[None]] = []
        self._waiters: list[_FlushWaiter] = []
        self._rejected: list[UnsentMessage] = []
        self._error: QueenError | None = None
        self.is_full = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def age_millis(self) -> float:
        """Age of the oldest message."""
        return (time.monotonic() - self._first_at) * 1000 if self._items else 0.0

    @property
    def rejected(self) -> int:
        """Number of messages the server rejected permanently."""
        return len(self._rejected)

    def add(self, item: bytes) -> bool:
        """Add an encoded item; returns whether a flush is due."""
        if not self._items:
            self._first_at = time.monotonic()
        self._items.append(item)
        self._held_bytes += len(item)
        self._added += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._flush_now)
        self._update_is_full()
        return len(self._items) - self._due >= self._message_count

    async def start_flush(self) -> None:
        """Start a flush and yield to the event loop once."""
        self._flush_now()
        await asyncio.sleep(0)

    async def wait_for_space(self) -> None:
        """Wait until the buffer is no longer full."""
        if len(self._rejected) >= self._max_messages:
            # Rejected messages are reported by flush and close; without those they would fill the memory.
            raise UnsentError(self.take_rejected())
        if not self.is_full:
            return
        self._flush_now()
        waiting = asyncio.get_running_loop().create_future()
        self._space_waiters.append(waiting)
        await waiting

    async def flush(self) -> None:
        """Send all messages buffered so far; on failure raises, and keeps the messages."""
        if not self._items:
            return
        waiter = _FlushWaiter(self._added)
        self._waiters.append(waiter)
        self._flush_requested.set()
        self._flush_now()
        await waiter.done

    def take_rejected(self) -> list[UnsentMessage]:
        """The messages rejected permanently since the last call."""
        rejected, self._rejected = self._rejected, []
        self._update_is_full()
        return rejected

    async def close(self) -> list[UnsentMessage]:
        """Stop sending; returns the unsent messages."""
        self._stop_timer()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        closed = ClientClosedError("the client was closed while waiting for a buffer")
        self._release(closed)
        error = str(self._error or closed)
        unsent = [_unsent(item, error) for item in self._items]
        self._items.clear()
        return self.take_rejected() + unsent

    def _update_is_full(self) -> None:
        held = len(self._items) + len(self._rejected)
        self.is_full = held >= self._max_messages or self._held_bytes >= self._max_bytes

    def _flush_now(self) -> None:
        """Make all buffered messages due."""
        self._stop_timer()
        self._due = len(self._items)
        if self._sender is None and self._due:
            self._sender = asyncio.get_running_loop().create_task(self._send_due())

    async def _send_due(self) -> None:
        failures = 0
        try:
            while self._due:
                try:
                    await self._send_batch(self._next_batch_size())
                    failures = 0
                except RequestError as error:
                    failures += 1
                    self._failed(error, failures)
                    self._flush_requested.clear()
                    pause = self._http.retry_delay(failures, error)
                    # An explicit flush cuts the retry delay short.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._flush_requested.wait(), pause)
        except Exception as error:
            # A bug of the client: fail the waiters, which would otherwise wait forever.
            self._fail_waiters(error)
            raise
        finally:
            self._sender = None
        if not self._items:
            self._on_empty(self)

    def _next_batch_size(self) -> int:
        """Number of due messages that fit into the next request."""
        size, held = 0, 0
        for item in islice(self._items, min(self._due, max(_MAX_REQUEST_MESSAGES, self._message_count))):
            held += len(item)
            if size and held > _MAX_REQUEST_BYTES:
                break
            size += 1
        return size

    async def _send_batch(self, size: int) -> None:
        """Send the first `size` messages; if the server rejects the request, bisect to find the cause."""
        items = list(islice(self._items, size))
        try:
            response = await self._http.send("POST", "/api/v1/push", b'{"items":[' + b",".join(items) + b"]}")
        except _RETRIED:
            raise
        except RequestError as error:
            if size == 1:
                self._reject(items[0], error)
                self._remove_sent(1)
                return
            await self._send_batch(size // 2)
            await self._send_batch(size - size // 2)
            return
        self._counts.flushes += 1
        results = decode_as(_results, response.body)
        rejected_items = [
            (index, result.error or "Push failed") for index, result in enumerate(results) if result.status == "failed"
        ]
        self._remove_sent(size, [items[index] for index, _ in rejected_items])
        if rejected_items:
            # A full queue accepts messages again after others are consumed.
            raise PushError(rejected_items[0][1], [msgspec.json.decode(items[index]) for index, _ in rejected_items])

    def _remove_sent(self, size: int, kept: list[bytes] | None = None) -> None:
        """Remove the first `size` messages, except `kept`, which stay at the front."""
        for _ in range(size):
            self._held_bytes -= len(self._items.popleft())
        if kept:
            self._items.extendleft(reversed(kept))
            self._held_bytes += sum(map(len, kept))
            size -= len(kept)
        self._due -= size
        self._sent += size
        self._error = None
        self._first_at = time.monotonic()
        self._update_is_full()
        self._resolve_waiters()

    def _resolve_waiters(self) -> None:
        room, self._space_waiters = self._space_waiters, []
        for waiting in room:
            if not waiting.done():
                waiting.set_result(None)
        for waiter in [waiter for waiter in self._waiters if waiter.until <= self._sent]:
            self._waiters.remove(waiter)
            if not waiter.done.done():
                waiter.done.set_result(None)

    def _failed(self, error: RequestError, failures: int) -> None:
        self._error = error
        self._counts.failures += 1
        self._log.warning(
            "Buffer.flush",
            f"flush of {len(self._items)} messages to {self.queue}/{self.partition} failed, retrying: {error}",
            failures=failures,
        )
        self._fail_waiters(error)

    def _fail_waiters(self, error: Exception) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done.done():
                waiter.done.set_exception(error)

    def _reject(self, item: bytes, error: RequestError) -> None:
        unsent = _unsent(item, str(error))
        self._rejected.append(unsent)
        self._log.warning(
            "Buffer.flush",
            f"message {unsent.transaction_id} to {self.queue}/{self.partition} rejected: {error}",
        )

    def _release(self, error: QueenError) -> None:
        """Fail everything that waits for this buffer."""
        for waiting in [*self._space_waiters, *(waiter.done for waiter in self._waiters)]:
            if not waiting.done():
                waiting.set_exception(error)
        self._space_waiters.clear()
        self._waiters.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _positive(options: BufferOptions, name: str) -> int:
    value = {**BUFFER_DEFAULTS, **options}[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise ValueError(f"buffer option {name} must be a number above 0, not {value!r}")
    return int(value)


def _unsent(item: bytes, error: str) -> UnsentMessage:
    read = _buffered.decode(item)
    return UnsentMessage(read.queue, read.partition, str(read.transaction_id), read.payload, error)


class Buffers:
    """The buffers of a client: one per partition, opened by its first push and discarded when empty."""

    def __init__(self, http: HttpClient, log: ClientLog, on_open: Callable[[], object]) -> None:
        self._http = http
        self._on_open = on_open
        self._log = log
        self._counts = BufferCounts()
        self._open: dict[tuple[str, str], Buffer] = {}
        self._closed = False

    def open(self, queue: str, partition: str, options: BufferOptions) -> Buffer:
        """The buffer of a partition; its options are those of the push that opened it."""
        buffer = self._open.get((queue, partition))
        if buffer is None:
            if self._closed:
                raise ClientClosedError("the Queen client is closed; create a new one")
            buffer = Buffer(queue, partition, options, self._http, self._log, self._counts, self._discard_if_empty)
            self._open[queue, partition] = buffer
            self._on_open()
        return buffer

    async def add_when_not_full(self, queue: str, partition: str, options: BufferOptions, item: bytes) -> None:
        """Wait until the buffer is not full, and add the item."""
        while (buffer := self.open(queue, partition, options)).is_full:
            await buffer.wait_for_space()
        if buffer.add(item):
            await buffer.start_flush()

    async def flush(self, queue: str, partition: str) -> None:
        """Flush the buffer of one partition; on failure raises, and keeps the messages."""
        buffer = self._open.get((queue, partition))
        if buffer is not None:
            await self._flush([buffer])

    async def flush_all(self) -> None:
        """Flush all buffers; on failure raises, and keeps the messages."""
        await self._flush(list(self._open.values()))

    async def close(self) -> list[UnsentMessage]:
        """Flush all buffers and close them; returns the unsent messages."""
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
            self._discard_if_empty(buffer)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, QueenError):
                raise outcome
        if rejected:
            raise UnsentError(rejected)
        for outcome in outcomes:
            if isinstance(outcome, QueenError):
                raise outcome

    def _discard_if_empty(self, buffer: Buffer) -> None:
        if not len(buffer) and not buffer.rejected and self._open.get((buffer.queue, buffer.partition)) is buffer:
            del self._open[buffer.queue, buffer.partition]
