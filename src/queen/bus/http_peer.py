"""Another host, reached over HTTP: events are batched for some milliseconds, and posted again when that fails."""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
from collections.abc import Callable, Iterable

import aiohttp

from queen.bus.members import Traffic
from queen.bus.packets import ROUTE, Event, Heartbeat, PacketWriter
from queen.errors import SettingsError

log = logging.getLogger(__name__)

# Well below what the other host accepts.
_BODY_BYTES = 48_000
_MOST_AT_ONCE = 2000
_MOST_QUEUED = 10_000
_TIMEOUT_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


class HttpPeer:
    """One other host at a URL, over one connection that is kept."""

    def __init__(
        self,
        url: str,
        name: str,
        writer: PacketWriter,
        traffic: Traffic,
        *,
        batch_seconds: float,
        read_tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """`read_tls` reads the certificates that are in force now; it may raise `SettingsError`."""
        self._url = url
        self._name = name
        self._writer = writer
        self._traffic = traffic
        self._batch_seconds = batch_seconds
        # A dict keeps the order, and an event that is published twice once.
        self._queued: dict[Event, None] = {}
        self._something = asyncio.Event()
        self._read_tls = read_tls
        self._session: aiohttp.ClientSession | None = None
        self._pause = 0.0
        self.is_self: bool | None = None
        """Whether the peer is this host itself; None while that is unknown."""

    def publish(self, events: Iterable[Event]) -> None:
        """Queue events; beyond a number the oldest are dropped, which the other host's slow poll makes up for."""
        if self.is_self:
            return
        for event in events:
            self._queued[event] = None
        self._drop_excess()
        self._something.set()

    async def post_events(self) -> None:
        """Post what is queued, forever."""
        while True:
            await self._something.wait()
            await asyncio.sleep(self._batch_seconds)
            some = list(itertools.islice(self._queued, _MOST_AT_ONCE))
            for event in some:
                del self._queued[event]
            if not await self._post_all(some):
                # Tried again before what came meanwhile.
                self._queued = dict.fromkeys(some) | self._queued
                self._drop_excess()
                await asyncio.sleep(self._pause)
            if not self._queued:
                self._something.clear()

    async def post_heartbeat(self, *, leaving: bool = False) -> None:
        """Post a heartbeat; the answer says whether this host is its own peer."""
        answer = await self._post(self._writer.heartbeat(Heartbeat(self._name, self._url, leaving)))
        if answer is not None:
            self.is_self = answer
            if self.is_self:
                self._queued.clear()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _drop_excess(self) -> None:
        excess = len(self._queued) - _MOST_QUEUED
        if excess > 0:
            for event in list(itertools.islice(self._queued, excess)):
                del self._queued[event]
            self._traffic.dropped["overflow"] += excess

    async def _post_all(self, events: list[Event]) -> bool:
        for frame, count in self._writer.events(events, _BODY_BYTES):
            if await self._post(frame) is None:
                return False
            self._traffic.events_sent += count
        return True

    async def _post(self, frame: bytes) -> bool | None:
        """Whether it was this very host that answered; None when it failed."""
        try:
            if self._session is None:
                tls = self._read_tls()
                self._session = aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(ssl=tls) if tls is not None else None,
                    timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS),
                )
            async with self._session.post(self._url + ROUTE, data=frame) as answer:
                if answer.status != 200:
                    return self._failed(f"it answered {answer.status}: {(await answer.text())[:200]}")
                own = bool((await answer.json())["self"])
        except aiohttp.ServerDisconnectedError:
            # Its text may be all that had come of the answer.
            await self.close()
            return self._failed("connection closed before the answer")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError, SettingsError) as error:
            # The next connection is made with the certificates of then: these may have been renewed.
            await self.close()
            if isinstance(error, TimeoutError):
                return self._failed(f"no answer within {_TIMEOUT_SECONDS:g} s")
            return self._failed(str(error) or type(error).__name__)
        if self._pause:
            log.info("peer %s is reachable again", self._url)
        self._pause = 0.0
        self._traffic.requests_sent += 1
        return own

    def _failed(self, why: str) -> bool | None:
        self._traffic.requests_failed += 1
        if not self._pause:
            log.warning("peer %s is unreachable (%s); retrying", self._url, why)
        self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self._pause))
        return None
