"""Messages of one partition on their way to the server: gathered, bounded, sent in order."""

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

_MOST_OF_A_REQUEST = 1000
_BYTES_OF_A_REQUEST = 4 * 1024 * 1024

# Failures that pass by themselves or by somebody's doing: the messages wait. All others would come again forever.
_PASSING = (QueenConnectionError, OverloadedError, ServerError, AuthError, PushError)


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
    """What all buffers of a client have done."""

    flushes: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Waiter:
    """Somebody who waits until everything up to a message was sent."""

    until: int
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Buffer:
    """Sends when `message_count` messages are there, or when the oldest has waited `time_millis`.

    A message leaves the buffer when the server has it. While the server is away, messages stay, and once there are
    `max_messages` or `max_bytes` of them, whoever pushes waits. Only one request is under way at a time, so the order
    is kept.
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
        self._hurry = asyncio.Event()
        self._room: list[asyncio.Future[None]] = []
        self._waiters: list[_Waiter] = []
        self._rejected: list[UnsentMessage] = []
        self._error: QueenError | None = None
        self.is_full = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def age_millis(self) -> float:
        """For how long the oldest message has been waiting."""
        return (time.monotonic() - self._first_at) * 1000 if self._items else 0.0

    @property
    def rejected(self) -> int:
        """How many messages the server refused for good."""
        return len(self._rejected)

    def add(self, item: bytes) -> bool:
        """Take an encoded item; whether it is now time to send."""
        if not self._items:
            self._first_at = time.monotonic()
        self._items.append(item)
        self._held_bytes += len(item)
        self._added += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._send_now)
        self._measure()
        return len(self._items) - self._due >= self._message_count

    async def begin_sending(self) -> None:
        """Start to send what is there, and give the event loop a moment to do it."""
        self._send_now()
        await asyncio.sleep(0)

    async def wait_for_room(self) -> None:
        """Return when the server has taken some of a full buffer."""
        if len(self._rejected) >= self._max_messages:
            # Nobody has asked for what was refused; the next one to push is told, before it fills the memory.
            raise UnsentError(self.take_rejected())
        if not self.is_full:
            return
        self._send_now()
        waiting = asyncio.get_running_loop().create_future()
        self._room.append(waiting)
        await waiting

    async def flush(self) -> None:
        """Send everything that is here now; raises what keeps it from being sent, and keeps the messages."""
        if not self._items:
            return
        waiter = _Waiter(self._added)
        self._waiters.append(waiter)
        self._hurry.set()
        self._send_now()
        await waiter.done

    def take_rejected(self) -> list[UnsentMessage]:
        """The messages that were refused for good since this was last asked for."""
        rejected, self._rejected = self._rejected, []
        self._measure()
        return rejected

    async def close(self) -> list[UnsentMessage]:
        """Stop sending; what was not sent."""
        self._stop_timer()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        closed = ClientClosedError("the client was closed while this waited for a buffer")
        self._release(closed)
        error = str(self._error or closed)
        unsent = [_unsent(item, error) for item in self._items]
        self._items.clear()
        return self.take_rejected() + unsent

    def _measure(self) -> None:
        held = len(self._items) + len(self._rejected)
        self.is_full = held >= self._max_messages or self._held_bytes >= self._max_bytes

    def _send_now(self) -> None:
        """Everything that is here is due."""
        self._stop_timer()
        self._due = len(self._items)
        if self._sender is None and self._due:
            self._sender = asyncio.get_running_loop().create_task(self._send_due())

    async def _send_due(self) -> None:
        failures = 0
        try:
            while self._due:
                try:
                    await self._send_some(self._next_size())
                    failures = 0
                except RequestError as error:
                    failures += 1
                    self._failed(error, failures)
                    self._hurry.clear()
                    pause = self._http.pause(failures, error)
                    # Whoever asks for a flush meanwhile does not wait for the end of the pause.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._hurry.wait(), pause)
        except Exception as error:
            # A fault of our own: whoever waits must hear of it rather than wait forever.
            self._fail_waiters(error)
            raise
        finally:
            self._sender = None
        if not self._items:
            self._on_empty(self)

    def _next_size(self) -> int:
        """How many of those due go into the next request."""
        size, held = 0, 0
        for item in islice(self._items, min(self._due, max(_MOST_OF_A_REQUEST, self._message_count))):
            held += len(item)
            if size and held > _BYTES_OF_A_REQUEST:
                break
            size += 1
        return size

    async def _send_some(self, size: int) -> None:
        """Send the first `size` messages. Where the server refuses them as a whole, find out which ones it means."""
        items = list(islice(self._items, size))
        try:
            answer = await self._http.send("POST", "/api/v1/push", b'{"items":[' + b",".join(items) + b"]}")
        except _PASSING:
            raise
        except RequestError as error:
            if size == 1:
                self._reject(items[0], error)
                self._took(1)
                return
            await self._send_some(size // 2)
            await self._send_some(size - size // 2)
            return
        self._counts.flushes += 1
        results = decode_as(_results, answer.body)
        refused = [
            (index, result.error or "Push failed") for index, result in enumerate(results) if result.status == "failed"
        ]
        self._took(size, [items[index] for index, _ in refused])
        if refused:
            # A full queue takes messages again when others have been consumed.
            raise PushError(refused[0][1], [msgspec.json.decode(items[index]) for index, _ in refused])

    def _took(self, size: int, back: list[bytes] | None = None) -> None:
        """The first `size` messages are with the server, apart from those that come back to the front."""
        for _ in range(size):
            self._held_bytes -= len(self._items.popleft())
        if back:
            self._items.extendleft(reversed(back))
            self._held_bytes += sum(map(len, back))
            size -= len(back)
        self._due -= size
        self._sent += size
        self._error = None
        self._first_at = time.monotonic()
        self._measure()
        self._release_those_sent()

    def _release_those_sent(self) -> None:
        room, self._room = self._room, []
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
            f"{len(self._items)} messages for {self.queue}/{self.partition} wait, because a flush failed: {error}",
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
            f"the server refuses message {unsent.transaction_id} for {self.queue}/{self.partition}: {error}",
        )

    def _release(self, error: QueenError) -> None:
        """Nobody waits for a buffer that is closed."""
        for waiting in [*self._room, *(waiter.done for waiter in self._waiters)]:
            if not waiting.done():
                waiting.set_exception(error)
        self._room.clear()
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
