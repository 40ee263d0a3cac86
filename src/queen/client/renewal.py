"""Keeps leases alive while a handler works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from queen.client.acks import RENEWAL_SECONDS, lease_ids
from queen.client.errors import LeaseLostError, QueenError
from queen.client.log import ClientLog
from queen.client.messages import Message
from queen.client.transport import Transport

# The shortest lease is a second. Once renewed, it lives for a minute.
_FIRST_SECONDS = 0.5
_UNTOLD_SECONDS = 20.0


class Renewal:
    """Renews every `interval_millis`; where none is given, soon and then every 20 seconds."""

    def __init__(self, transport: Transport, interval_millis: int | None, log: ClientLog) -> None:
        self._transport = transport
        self._log = log
        self._first = interval_millis / 1000 if interval_millis else _FIRST_SECONDS
        self._interval = interval_millis / 1000 if interval_millis else _UNTOLD_SECONDS
        # Long enough that one renewal may fail and the next still comes in time.
        self._seconds = max(RENEWAL_SECONDS, 3 * self._interval)

    @asynccontextmanager
    async def keeping(self, messages: Sequence[Message]) -> AsyncIterator[None]:
        """Renew the leases of these messages while the block runs."""
        leases = lease_ids(messages)
        task = asyncio.create_task(self._renew(leases))
        try:
            yield
        finally:
            task.cancel()

    async def _renew(self, leases: list[str]) -> None:
        pause = self._first
        while leases:
            await asyncio.sleep(pause)
            pause = self._interval
            for lease in list(leases):
                try:
                    await self._transport.renew(lease, self._seconds)
                except LeaseLostError as error:
                    leases.remove(lease)
                    self._log.warning("Consumer.renew", f"lease {lease} is lost, its messages come again: {error}")
                except QueenError as error:
                    self._log.warning("Consumer.renew", f"lease {lease} was not renewed: {error}")
