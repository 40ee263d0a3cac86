"""The components of a client, wired together; `Queen` is its public interface."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from queen.client.admin import DlqQuery
from queen.client.buffer import Buffers
from queen.client.config import ClientConfig, ClientLog
from queen.client.consume.acks import Acker
from queen.client.consume.consumer import ConsumeOptions, Consumer, QueueDeliveries, Renewal, Tracer
from queen.client.consume.transport import HttpTransport, Popper, TransportMaker
from queen.client.consume.websocket import WebSocketTransport
from queen.client.errors import QueenError, UnsentMessage
from queen.client.http import HttpClient
from queen.client.push import Pusher, TransactionIds
from queen.client.types import Message, Subscription


class Engine:
    """The components of a client and its lifecycle."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.log = ClientLog()
        self.http = HttpClient(config, self.log)
        self.ids = TransactionIds()
        self.signals = SignalHandlers(self._stop_consumers, self._flush_before_exit) if config.handle_signals else None
        self.buffers = Buffers(self.http, self.log, on_open=self._install_signal_handlers)
        self.pusher = Pusher(self.http, self.buffers, self.ids, self.log)
        self.acker = Acker(self.http, self.log, config.strict)
        self.transports: dict[str, TransportMaker] = {
            "http": self._http_transport,
            "websocket": self._websocket_transport,
        }
        self._consumers: set[Consumer[Any]] = set()

    async def pop(self, subscription: Subscription, *, auto_ack: bool) -> list[Message]:
        """Pop once; on failure logs a warning and returns nothing, unless the client is strict."""
        popper = Popper(self.http, subscription)
        try:
            return await popper.pop(subscription.batch, subscription.timeout_millis, auto_ack=auto_ack)
        except QueenError as error:
            if self.config.strict:
                raise
            self.log.warning("QueueBuilder.pop", f"pop failed: {error}")
            return []

    async def consume(
        self,
        handler: Callable[[Any], Awaitable[object] | object],
        subscription: Subscription,
        options: ConsumeOptions,
        signal: asyncio.Event | None,
        transport: str,
    ) -> None:
        """Run a consumer until it stops."""
        maker = self.transports.get(transport)
        if maker is None:
            raise ValueError(f"transport must be one of {', '.join(self.transports)}, not {transport!r}")
        opened = maker(subscription)
        renewal = Renewal(opened, options.renew_interval_millis, self.log) if options.renew_lease else None
        deliveries = QueueDeliveries(opened, Tracer(self.http, self.log, subscription.group), renewal)
        await self.run(Consumer(deliveries, handler, options, self.http, self.log), signal)

    async def run(self, consumer: Consumer[Any], signal: asyncio.Event | None) -> None:
        """Run a consumer until it stops; closing the client or a signal stops it, too."""
        self._consumers.add(consumer)
        self._install_signal_handlers()
        try:
            await consumer.run(signal)
        finally:
            self._consumers.discard(consumer)
            if not self._consumers and not self.buffers.stats()["totalBufferedMessages"]:
                self._remove_signal_handlers()

    def dead_letters(self, queue: str, group: str | None, partition: str) -> DlqQuery:
        return DlqQuery(self.http, self.log, self.config.strict, queue, group, partition)

    async def close(self) -> list[UnsentMessage]:
        """Stop consumers, flush buffers, close connections, in this order; returns the unsent messages."""
        self._stop_consumers()
        here = asyncio.current_task()
        for consumer in list(self._consumers):
            # A handler that closes its own client must not wait for itself.
            if not consumer.runs_in(here):
                await consumer.finished.wait()
        unsent = await self.buffers.close()
        await self.http.close()
        self._remove_signal_handlers()
        return unsent

    def _stop_consumers(self) -> bool:
        """Stop the consumers; returns whether there are any."""
        for consumer in self._consumers:
            consumer.stop()
        return bool(self._consumers)

    async def _flush_before_exit(self) -> None:
        """Flush the buffers before a signal ends the process."""
        try:
            await self.buffers.flush_all()
        except QueenError as error:
            self.log.warning("Queen.signal", f"flush before exit failed, buffered messages are lost: {error}")

    def _install_signal_handlers(self) -> None:
        if self.signals is not None:
            self.signals.install()

    def _remove_signal_handlers(self) -> None:
        if self.signals is not None:
            self.signals.remove()

    def _http_transport(self, subscription: Subscription) -> HttpTransport:
        return HttpTransport(self.http, self.acker, subscription)

    def _websocket_transport(self, subscription: Subscription) -> WebSocketTransport:
        return WebSocketTransport(self.http, subscription, self.log)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class SignalHandlers:
    """Handlers for SIGINT and SIGTERM while messages are consumed or buffered, if the program has none of its own."""

    def __init__(self, stop: Callable[[], bool], flush: Callable[[], Awaitable[None]]) -> None:
        """`stop` stops consumers, and returns whether there are any. If not, `flush` runs before the process ends."""
        self._stop = stop
        self._flush = flush
        self._previous: dict[signal.Signals, _Handler] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Install the handlers, once; only possible in the main thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if not _is_default(handler):
                continue
            try:
                self._loop.add_signal_handler(number, self._received, number)
            except NotImplementedError:
                # Not supported by event loops on Windows.
                return
            self._previous[number] = handler

    def remove(self) -> None:
        """Restore the previous handlers."""
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            assert self._loop is not None
            self._loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def _received(self, number: signal.Signals) -> None:
        # A second signal has its default effect.
        self.remove()
        if not self._stop():
            self._ending = asyncio.ensure_future(self._end(number))

    async def _end(self, number: signal.Signals) -> None:
        await self._flush()
        signal.raise_signal(number)


def _is_default(handler: _Handler) -> bool:
    """Whether the handler is Python's or the one that `asyncio.run` installs for SIGINT."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return getattr(getattr(handler, "func", None), "__module__", "") == "asyncio.runners"
