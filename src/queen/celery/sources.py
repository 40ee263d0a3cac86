"""Where messages come from: threads that wait at the server, and the inbox that an event loop reads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from kombu.log import get_logger

from queen.celery.link import Address, Link, is_readable
from queen.client.errors import TRANSIENT, AuthError, OverloadedError, RequestError
from queen.wire.paths import path_of

POLL_SECONDS = 20.0
# More than a server takes to answer a poll that has ended.
_GRACE_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_LOG_BATCH = 100

logger = get_logger("queen.celery")


class Inbox:
    """Messages that arrived and are not delivered yet; a pipe wakes the reader, by `select` or with an event loop."""

    def __init__(self) -> None:
        self._entries: deque[list[Any] | Exception] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._closed = False

    def fileno(self) -> int:
        return self._reader

    def put(self, entry: list[Any] | Exception) -> None:
        """Add what one request brought, or why it failed; from any thread."""
        self._entries.append(entry)
        self._wake()

    def take(self) -> list[Any] | Exception | None:
        """The oldest entry, or None."""
        try:
            return self._entries.popleft()
        except IndexError:
            return None

    def remove(self, is_unwanted: Callable[[Any], bool]) -> list[Any]:
        """Take out messages, and return them."""
        removed: list[Any] = []
        kept: list[list[Any] | Exception] = []
        while (entry := self.take()) is not None:
            if isinstance(entry, list):
                removed += [one for one in entry if is_unwanted(one)]
                entry = [one for one in entry if not is_unwanted(one)]
            if entry:
                kept.append(entry)
        for entry in kept:
            self.put(entry)
        return removed

    def wait(self, seconds: float | None) -> bool:
        """Wait for an entry; False if none came in time."""
        return is_readable(self._reader, None if seconds is None else max(0.0, seconds))

    def clear_wakeup(self) -> None:
        """Empty the pipe; call it before taking entries, so that none that comes later is overlooked."""
        # Asked first: eventlet's `os.read` waits where that of Python raises. What is left over wakes once more.
        if is_readable(self._reader, 0.0):
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)

    def rearm(self) -> None:
        """Wake the reader again if entries are left."""
        if self._entries:
            self._wake()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._reader)
            os.close(self._writer)

    def _wake(self) -> None:
        # Full means that the reader is woken anyway; closed, that there is none.
        with contextlib.suppress(OSError):
            os.write(self._writer, b"x")


class Source:
    """A thread that polls the server and hands over what it gets.

    An outage shorter than `outage_grace` seconds is waited out, because leases outlive it; a longer one is handed over
    as an error, upon which Celery connects again.
    """

    def __init__(self, name: str, address: Address, outage_grace: float, on_error: Callable[[Exception], None]) -> None:
        self._link = Link(address)
        self._outage_grace = outage_grace
        self._on_error = on_error
        self.stopped = False
        self._thread = threading.Thread(target=self._run, name=f"queen-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, at once."""
        self.stopped = True
        self._link.close()

    def poll(self) -> None:
        """Wait for messages once, and hand them over; raises `RequestError`."""
        raise NotImplementedError

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        failing_since: float | None = None
        while not self.stopped:
            try:
                self.poll()
            except TRANSIENT as error:
                if self.stopped:
                    return
                now = time.monotonic()
                if failing_since is None:
                    failing_since = now
                    logger.warning("polling %s failed, retrying: %s", self._link.address.url, error)
                elif now - failing_since > self._outage_grace:
                    self._on_error(error)
                    return
                asked = error.retry_after if isinstance(error, OverloadedError) else None
                time.sleep(max(pause, min(asked or 0.0, _LONGEST_PAUSE_SECONDS)))
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
            except (RequestError, msgspec.DecodeError) as error:
                if not self.stopped:
                    self._on_error(error)
                return
            else:
                pause, failing_since = _FIRST_PAUSE_SECONDS, None


class Item(msgspec.Struct):
    """A dequeued item."""

    id: int
    topic: str
    lease_owner: str
    retries: int
    data: Any = None


_items = msgspec.json.Decoder(list[Item])


class TopicSource(Source):
    """Leases items of topics, as many as there is room for."""

    def __init__(
        self,
        address: Address,
        topics: tuple[str, ...],
        lease_seconds: float,
        wait_for_room: Callable[[Source], int],
        on_items: Callable[[list[Item]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        super().__init__("topics", address, lease_seconds, on_error)
        self._wait_for_room = wait_for_room
        self._on_items = on_items
        self._query = dequeue_query(address.namespace, topics, lease_seconds)

    def poll(self) -> None:
        limit = self._wait_for_room(self)
        if self.stopped:
            return
        path = f"{self._query}&limit={limit}&wait=true&timeout={int(POLL_SECONDS * 1000)}"
        items = _items.decode(self._link.get(path, POLL_SECONDS + _GRACE_SECONDS))
        if items:
            self._on_items(items)


def dequeue_query(namespace: str, topics: tuple[str, ...], lease_seconds: float) -> str:
    """The path of a dequeue without its limit."""
    query: dict[str, str | float] = {"namespace": namespace, "lease": lease_seconds}
    if len(topics) == 1:
        return f"/api/v1/topics/dequeue?{urlencode({**query, 'topic': topics[0]}, quote_via=quote)}"
    names = msgspec.json.encode(topics).decode()
    return f"/api/v1/topics/dequeue/many?{urlencode({**query, 'topics': names}, quote_via=quote)}"


def decode_items(body: bytes) -> list[Item]:
    return _items.decode(body)


class _LogMessage(msgspec.Struct):
    data: Any


class _Popped(msgspec.Struct):
    messages: list[_LogMessage] = []


_popped = msgspec.json.Decoder(_Popped)


class ExchangeLog:
    """The queue that holds what is published to an exchange; each listener is a consumer group on it."""

    def __init__(self, namespace: str, exchange: str) -> None:
        self.queue = f"{namespace}/{exchange}"
        self._path = path_of("/api/v1/pop/queue", self.queue)

    def create(self, link: Link, retention_seconds: int) -> None:
        """Create the queue: it keeps messages for a while, also without listeners."""
        options = {"retentionEnabled": True, "retentionSeconds": retention_seconds}
        try:
            link.post("/api/v1/configure", {"queue": self.queue, "options": options})
        except AuthError as error:
            logger.warning("this token may not set the retention of queue %s: %s", self.queue, error)

    def push(self, link: Link, message: Any) -> None:
        link.post("/api/v1/push", {"items": [{"queue": self.queue, "payload": message}]})

    def subscribe(self, link: Link, listener: str) -> None:
        """Begin a listener at the end of the log: the first pop fixes its place."""
        link.get(self.pop_path(listener, wait=False))
        group = path_of("/api/v1/consumer-groups", listener, "queues", self.queue)
        # One that is new begins at the end anyway; a token that may not move groups leaves others where they were.
        with contextlib.suppress(AuthError):
            link.post(f"{group}/seek", {"toEnd": True})

    def unsubscribe(self, link: Link, listener: str) -> None:
        link.delete(path_of("/api/v1/consumer-groups", listener, "queues", self.queue))

    def pop_path(self, listener: str, *, wait: bool) -> str:
        query: dict[str, str | int] = {
            "consumerGroup": listener,
            "autoAck": "true",
            "batch": _LOG_BATCH,
            "subscriptionMode": "new",
        }
        if wait:
            query |= {"wait": "true", "timeout": int(POLL_SECONDS * 1000)}
        return f"{self._path}?{urlencode(query, quote_via=quote)}"


class LogSource(Source):
    """Reads what is published to an exchange, for one listener."""

    def __init__(
        self,
        address: Address,
        log: ExchangeLog,
        listener: str,
        outage_grace: float,
        on_messages: Callable[[str, list[Any]], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        super().__init__("exchange", address, outage_grace, on_error)
        self._listener = listener
        self._on_messages = on_messages
        self._path = log.pop_path(listener, wait=True)

    def poll(self) -> None:
        body = self._link.get(self._path, POLL_SECONDS + _GRACE_SECONDS)
        if body:
            messages = [message.data for message in _popped.decode(body).messages]
            if messages:
                self._on_messages(self._listener, messages)
