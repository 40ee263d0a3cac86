"""What a client is made of, wired together once; `Queen` is its public face."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from queen.client.acks import Acker
from queen.client.admin import DlqQuery
from queen.client.buffer import Buffers
from queen.client.config import ClientConfig, ClientLog
from queen.client.consumer import ConsumeOptions, Consumer, QueueDeliveries, Renewal
from queen.client.errors import QueenError, UnsentMessage
from queen.client.http import HttpClient
from queen.client.push import Pusher, TransactionIds
from queen.client.threads import StopSignals
from queen.client.trace import Tracer
from queen.client.transport import HttpTransport, Popper, TransportMaker
from queen.client.types import Message, Subscription
from queen.client.websocket import WebSocketTransport


class Engine:
    """The parts of a client, and what they do together."""

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.log = ClientLog()
        self.http = HttpClient(config, self.log)
        self.ids = TransactionIds()
        self.signals = StopSignals(self._stop_consumers, self._send_last) if config.handle_signals else None
        self.buffers = Buffers(self.http, self.log, on_open=self._watch_signals)
        self.pusher = Pusher(self.http, self.buffers, self.ids, self.log)
        self.acker = Acker(self.http, self.log, config.strict)
        self.transports: dict[str, TransportMaker] = {
            "http": self._http_transport,
            "websocket": self._websocket_transport,
        }
        self._consumers: set[Consumer[Any]] = set()

    async def pop(self, subscription: Subscription, *, auto_ack: bool) -> list[Message]:
        """Pop once; nothing (and a warning) on failure, unless the client is strict."""
        popper = Popper(self.http, subscription)
        try:
            return await popper.pop(subscription.batch, subscription.timeout_millis, auto_ack=auto_ack)
        except QueenError as error:
            if self.config.strict:
                raise
            self.log.warning("QueueBuilder.pop", f"answered with nothing, because it failed: {error}")
            return []

    async def consume(
        self,
        handler: Callable[[Any], Awaitable[object] | object],
        subscription: Subscription,
        options: ConsumeOptions,
        signal: asyncio.Event | None,
        transport: str,
    ) -> None:
        """Run a consumer to its end."""
        maker = self.transports.get(transport)
        if maker is None:
            raise ValueError(f"transport must be one of {', '.join(self.transports)}, not {transport!r}")
        way = maker(subscription)
        renewal = Renewal(way, options.renew_interval_millis, self.log) if options.renew_lease else None
        deliveries = QueueDeliveries(way, Tracer(self.http, self.log, subscription.group), renewal)
        await self.run(Consumer(deliveries, handler, options, self.http, self.log), signal)

    async def run(self, consumer: Consumer[Any], signal: asyncio.Event | None) -> None:
        """Run a consumer to its end, which may be that of the client or of the program."""
        self._consumers.add(consumer)
        self._watch_signals()
        try:
            await consumer.run(signal)
        finally:
            self._consumers.discard(consumer)
            if not self._consumers and not self.buffers.stats()["totalBufferedMessages"]:
                self._leave_signals()

    def dead_letters(self, queue: str, group: str | None, partition: str) -> DlqQuery:
        return DlqQuery(self.http, self.log, self.config.strict, queue, group, partition)

    async def close(self) -> list[UnsentMessage]:
        """End everything in the order that loses nothing; what was buffered and could not be sent."""
        self._stop_consumers()
        here = asyncio.current_task()
        for consumer in list(self._consumers):
            # A handler that closes its own client must not wait for itself.
            if not consumer.runs_in(here):
                await consumer.finished.wait()
        unsent = await self.buffers.close()
        await self.http.close()
        self._leave_signals()
        return unsent

    def _stop_consumers(self) -> bool:
        """Ask the consumers to end; whether there are any."""
        for consumer in self._consumers:
            consumer.stop()
        return bool(self._consumers)

    async def _send_last(self) -> None:
        """The program is about to be ended: send what is buffered."""
        try:
            await self.buffers.flush_all()
        except QueenError as error:
            self.log.warning("Queen.signal", f"messages in buffers are lost with this program: {error}")

    def _watch_signals(self) -> None:
        if self.signals is not None:
            self.signals.watch()

    def _leave_signals(self) -> None:
        if self.signals is not None:
            self.signals.leave()

    def _http_transport(self, subscription: Subscription) -> HttpTransport:
        return HttpTransport(self.http, self.acker, subscription)

    def _websocket_transport(self, subscription: Subscription) -> WebSocketTransport:
        return WebSocketTransport(self.http, subscription, self.log)
