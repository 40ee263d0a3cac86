"""Consuming over a WebSocket instead of long polls: `consume(handler, transport="websocket")`."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from queen.client.acks import Ack, AckResult
from queen.client.config import ClientLog
from queen.client.errors import (
    LeaseLostError,
    NotFoundError,
    QueenConnectionError,
    QueenTimeoutError,
    RequestError,
    error_of_status,
)
from queen.client.http import HttpClient, encode_json
from queen.client.types import DEFAULT_PARTITION, Message, Subscription

_PATH = "/ws/v1/consume"
_SUBSCRIPTION = "s"
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 30.0
_LEAVE_SECONDS = 2.0
_HEARTBEAT_SECONDS = 20.0
_POLL_MILLIS = 100


class _Frame(msgspec.Struct):
    """What any message of the server's may hold."""

    type: str
    id: Any = None
    messages: list[Any] = []
    results: list[AckResult] = []
    status: int = 0
    error: str = ""


_decode = msgspec.json.Decoder(_Frame).decode


class WebSocketTransport:
    """One connection for all workers of a consumer, made when it is needed and again when it is lost.

    What was delivered over a connection that ends before it is acknowledged is released by the server, and comes again
    at once: to this consumer or another.
    """

    def __init__(self, http: HttpClient, subscription: Subscription, log: ClientLog) -> None:
        if not subscription.queue:
            raise ValueError("a WebSocket consumes one queue: name it, or use the transport 'http'")
        self._http = http
        self._subscription = subscription
        self._log = log
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        link = await self._connected()
        return await link.fetch(batch, timeout_millis if self._subscription.wait else _POLL_MILLIS)

    async def ack(self, acks: list[Ack]) -> list[AckResult]:
        link = await self._open_link()
        answer = await link.ask("ack", acknowledgments=acks, consumerGroup=self._subscription.group)
        return answer.results

    async def renew(self, lease: str, seconds: float) -> None:
        link = await self._open_link()
        try:
            await link.ask("renew", leaseId=lease, seconds=seconds)
        except NotFoundError as error:
            raise LeaseLostError(str(error), error.method, error.url, error.status) from error

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.leave()

    async def _open_link(self) -> _Link:
        """Where something can be asked: a server that is about to close the connection still takes acks on it."""
        link = self._link
        return link if link is not None and link.is_open else await self._connected()

    async def _connected(self) -> _Link:
        """Where something will be delivered."""
        async with self._connecting:
            if self._link is None or not self._link.is_usable:
                self._link = await self._connect()
            return self._link

    async def _connect(self) -> _Link:
        """Connect to the first server that takes it, in the order of the balancer."""
        failure: RequestError | None = None
        for url in self._http.balancer.order(self._subscription.affinity_key):
            try:
                link = await _open(url + _PATH, self._http, self._log)
                await link.subscribe(self._subscription)
            except QueenConnectionError as error:
                failure = error
                self._http.balancer.failed(url)
            else:
                self._http.balancer.served(url)
                return link
        assert failure is not None
        raise failure


async def _open(url: str, http: HttpClient, log: ClientLog) -> _Link:
    session = aiohttp.ClientSession(headers=http.headers, cookie_jar=aiohttp.DummyCookieJar())
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            socket = await session.ws_connect(
                url,
                protocols=("queen.v1",),
                heartbeat=_HEARTBEAT_SECONDS,
                max_msg_size=0,
                ssl=http.check_certificates,
            )
    except BaseException as error:
        await session.close()
        if isinstance(error, aiohttp.WSServerHandshakeError) and error.status < 500:
            raise error_of_status(error.status, error.message, b"", "", "GET", url) from error
        if isinstance(error, TimeoutError):
            raise QueenTimeoutError(f"no connection after {_CONNECT_SECONDS} s", "GET", url) from error
        if isinstance(error, aiohttp.ClientError | OSError):
            raise QueenConnectionError(f"connection failed: {error or type(error).__name__}", "GET", url) from error
        raise
    return _Link(session, socket, url, log)


class _Link:
    """A connection as long as it lasts: what was asked over it, and what was delivered and not fetched yet."""

    def __init__(
        self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str, log: ClientLog
    ) -> None:
        self._session = session
        self._socket = socket
        self._url = url
        self._log = log
        self._answers: dict[int | str, asyncio.Future[_Frame]] = {}
        self._asked = 0
        # None wakes whoever waits when the connection has ended.
        self._delivered: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        self._rest: list[Message] = []
        self._waiting = 0
        self._credit = 0
        self._closing = False
        self._reader = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._reader.done()

    @property
    def is_usable(self) -> bool:
        """Whether the server goes on delivering."""
        return self.is_open and not self._closing

    async def subscribe(self, source: Subscription) -> None:
        """Begin the one subscription of this connection; its first batch may come at once."""
        wanted = {
            "queue": source.queue,
            "partition": source.partition if source.partition != DEFAULT_PARTITION else None,
            "consumerGroup": source.group,
            "batch": source.batch,
            "partitions": source.partitions,
            "subscriptionMode": source.mode,
            "subscriptionFrom": source.start,
        }
        self._credit = 1
        try:
            await self._ask(_SUBSCRIPTION, "subscribe", {name: value for name, value in wanted.items() if value})
        except BaseException:
            await self.close()
            raise

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        """What was delivered, or is within this time. Each that waits has the credit for one batch."""
        messages = self._rest or await self._next(timeout_millis / 1000)
        # What is more than was asked for waits for the next; never fetched, it goes back with the connection.
        self._rest = messages[batch:]
        return messages[:batch]

    async def ask(self, type: str, **fields: Any) -> _Frame:
        """Send a request and wait for its answer."""
        self._asked += 1
        return await self._ask(self._asked, type, fields)

    async def leave(self) -> None:
        """Have what was delivered and not acknowledged given back, and close."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._ask(_SUBSCRIPTION, "unsubscribe", {"release": True})
        except (RequestError, TimeoutError) as error:
            self._log.warning("Consumer.stop", f"what was not acknowledged comes free as the connection ends: {error}")
        await self.close()

    async def close(self) -> None:
        self._closing = True
        await self._socket.close()
        await self._session.close()
        await asyncio.wait([self._reader])

    async def _next(self, seconds: float) -> list[Message]:
        self._waiting += 1
        try:
            if self._credit + self._delivered.qsize() < self._waiting:
                self._credit += 1
                await self._send("credit", id=_SUBSCRIPTION, credit=1)
            async with asyncio.timeout(seconds):
                messages = await self._delivered.get()
        except TimeoutError:
            return []
        finally:
            self._waiting -= 1
        if messages is None:
            self._delivered.put_nowait(None)
            raise self._ended()
        return messages

    async def _ask(self, id: int | str, type: str, fields: dict[str, Any]) -> _Frame:
        answer: asyncio.Future[_Frame] = asyncio.get_running_loop().create_future()
        self._answers[id] = answer
        try:
            await self._send(type, id=id, **fields)
            async with asyncio.timeout(_ANSWER_SECONDS):
                frame = await answer
        except TimeoutError as error:
            raise QueenTimeoutError(f"no answer to {type} after {_ANSWER_SECONDS} s", type, self._url) from error
        finally:
            self._answers.pop(id, None)
        if frame.type == "error":
            raise error_of_status(frame.status, frame.error, encode_json({"error": frame.error}), "", type, self._url)
        return frame

    async def _send(self, type: str, **fields: Any) -> None:
        try:
            await self._socket.send_str(encode_json({"type": type, **fields}).decode())
        except (aiohttp.ClientError, OSError) as error:
            raise self._ended() from error

    async def _read(self) -> None:
        """Take in what the server sends until the connection ends, then tell everybody who waits."""
        try:
            async for received in self._socket:
                if received.type is aiohttp.WSMsgType.TEXT:
                    self._take(_decode(received.data))
        finally:
            self._delivered.put_nowait(None)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._ended())
            await self._session.close()

    def _take(self, frame: _Frame) -> None:
        answer = self._answers.get(frame.id)
        if frame.type == "batch":
            self._credit -= 1
            self._delivered.put_nowait(frame.messages)
        elif frame.type == "closing":
            self._closing = True
        elif answer is not None and not answer.done():
            answer.set_result(frame)
        elif frame.type == "error":
            self._log.warning("Consumer.fetch", f"nothing can be fetched, the server goes on trying: {frame.error}")

    def _ended(self) -> QueenConnectionError:
        return QueenConnectionError("the connection ended", "GET", self._url)
