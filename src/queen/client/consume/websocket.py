"""WebSocket transport: `consume(handler, transport="websocket")`."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from queen.client.config import ClientLog
from queen.client.consume.acks import Ack, AckResult
from queen.client.errors import (
    LeaseLostError,
    NotFoundError,
    QueenConnectionError,
    QueenTimeoutError,
    RequestError,
    error_of_status,
)
from queen.client.http import HttpClient, decode_unusual, encode_json
from queen.client.types import DEFAULT_PARTITION, Message, Subscription

_PATH = "/ws/v1/consume"
_SUBSCRIPTION = "s"
_CONNECT_SECONDS = 10.0
_RESPONSE_SECONDS = 30.0
_UNSUBSCRIBE_SECONDS = 2.0
_HEARTBEAT_SECONDS = 20.0
_POLL_MILLIS = 100


class _Frame(msgspec.Struct):
    """A message of the server, with the fields of all types."""

    type: str
    id: Any = None
    messages: list[Any] = []
    results: list[AckResult] = []
    status: int = 0
    error: str = ""


_frame = msgspec.json.Decoder(_Frame)


class WebSocketTransport:
    """One connection shared by the workers of a consumer, opened on demand and reopened when lost.

    When a connection ends, the server releases its unacknowledged messages for redelivery.
    """

    def __init__(self, http: HttpClient, subscription: Subscription, log: ClientLog) -> None:
        if not subscription.queue:
            raise ValueError("the websocket transport consumes one queue: name it, or use transport 'http'")
        self._http = http
        self._subscription = subscription
        self._log = log
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        connection = await self._connected()
        return await connection.fetch(batch, timeout_millis if self._subscription.wait else _POLL_MILLIS)

    async def ack(self, acks: list[Ack]) -> list[AckResult]:
        connection = await self._open_connection()
        response = await connection.request("ack", acknowledgments=acks, consumerGroup=self._subscription.group)
        return response.results

    async def renew(self, lease: str, seconds: float) -> None:
        connection = await self._open_connection()
        try:
            await connection.request("renew", leaseId=lease, seconds=seconds)
        except NotFoundError as error:
            raise LeaseLostError(str(error), error.method, error.url, error.status) from error

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.unsubscribe()

    async def _open_connection(self) -> _Connection:
        """A connection for requests: a server that is about to close it still accepts acks."""
        connection = self._connection
        return connection if connection is not None and connection.is_open else await self._connected()

    async def _connected(self) -> _Connection:
        """A connection that delivers messages."""
        async with self._connecting:
            if self._connection is None or not self._connection.is_usable:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> _Connection:
        """Connect to the first reachable server, in the order of the balancer."""
        failure: RequestError | None = None
        for url in self._http.balancer.order(self._subscription.affinity_key):
            try:
                connection = await _open(url + _PATH, self._http, self._log)
                await connection.subscribe(self._subscription)
            except QueenConnectionError as error:
                failure = error
                self._http.balancer.mark_failed(url)
            else:
                self._http.balancer.mark_healthy(url)
                return connection
        assert failure is not None
        raise failure


async def _open(url: str, http: HttpClient, log: ClientLog) -> _Connection:
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
            raise QueenConnectionError(
                f"connection failed: {str(error) or type(error).__name__}", "GET", url
            ) from error
        raise
    return _Connection(session, socket, url, log)


class _Connection:
    """A connection with its pending requests and the delivered batches not fetched yet."""

    def __init__(
        self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str, log: ClientLog
    ) -> None:
        self._session = session
        self._socket = socket
        self._url = url
        self._log = log
        self._responses: dict[int | str, asyncio.Future[_Frame]] = {}
        self._last_request_id = 0
        # None marks the end of the connection and wakes waiting fetches.
        self._delivered: asyncio.Queue[list[Message] | None] = asyncio.Queue()
        self._unfetched: list[Message] = []
        self._waiting = 0
        self._credit = 0
        self._closing = False
        self._reader = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._reader.done()

    @property
    def is_usable(self) -> bool:
        """Whether the server will deliver more."""
        return self.is_open and not self._closing

    async def subscribe(self, source: Subscription) -> None:
        """Start the subscription of this connection, with credit for a first batch."""
        fields = {
            "queue": source.queue,
            "partition": source.partition if source.partition != DEFAULT_PARTITION else None,
            "consumerGroup": source.group,
            "batch": source.batch,
            "partitions": source.partitions,
            "subscriptionMode": source.mode,
            "subscriptionFrom": source.start,
            "conflation": source.conflation,
        }
        self._credit = 1
        try:
            await self._request(_SUBSCRIPTION, "subscribe", {name: value for name, value in fields.items() if value})
        except BaseException:
            await self.close()
            raise

    async def fetch(self, batch: int, timeout_millis: int) -> list[Message]:
        """Delivered messages, or those delivered within the timeout. Each waiting fetch grants credit for one batch."""
        messages = self._unfetched or await self._next(timeout_millis / 1000)
        # The rest is for the next fetch; closing the connection releases what is never fetched.
        self._unfetched = messages[batch:]
        return messages[:batch]

    async def request(self, type: str, **fields: Any) -> _Frame:
        """Send a request and wait for its response."""
        self._last_request_id += 1
        return await self._request(self._last_request_id, type, fields)

    async def unsubscribe(self) -> None:
        """Unsubscribe, which releases unacknowledged messages, and close."""
        try:
            async with asyncio.timeout(_UNSUBSCRIBE_SECONDS):
                await self._request(_SUBSCRIPTION, "unsubscribe", {"release": True})
        except (RequestError, TimeoutError) as error:
            self._log.warning(
                "Consumer.stop", f"unsubscribe failed, messages are released when the connection closes: {error}"
            )
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
            raise self._closed_error()
        return messages

    async def _request(self, id: int | str, type: str, fields: dict[str, Any]) -> _Frame:
        response: asyncio.Future[_Frame] = asyncio.get_running_loop().create_future()
        self._responses[id] = response
        try:
            await self._send(type, id=id, **fields)
            async with asyncio.timeout(_RESPONSE_SECONDS):
                frame = await response
        except TimeoutError as error:
            raise QueenTimeoutError(f"no response to {type} after {_RESPONSE_SECONDS} s", type, self._url) from error
        finally:
            self._responses.pop(id, None)
        if frame.type == "error":
            raise error_of_status(frame.status, frame.error, encode_json({"error": frame.error}), "", type, self._url)
        return frame

    async def _send(self, type: str, **fields: Any) -> None:
        try:
            await self._socket.send_str(encode_json({"type": type, **fields}).decode())
        except (aiohttp.ClientError, OSError) as error:
            raise self._closed_error() from error

    async def _read(self) -> None:
        """Read frames until the connection ends, then fail everything that waits."""
        try:
            async for received in self._socket:
                if received.type is aiohttp.WSMsgType.TEXT:
                    self._on_frame(decode_unusual(_frame, received.data))
        finally:
            self._delivered.put_nowait(None)
            for response in self._responses.values():
                if not response.done():
                    response.set_exception(self._closed_error())
            await self._session.close()

    def _on_frame(self, frame: _Frame) -> None:
        response = self._responses.get(frame.id)
        if frame.type == "batch":
            self._credit -= 1
            self._delivered.put_nowait(frame.messages)
        elif frame.type == "closing":
            self._closing = True
        elif response is not None and not response.done():
            response.set_result(frame)
        elif frame.type == "error":
            self._log.warning("Consumer.fetch", f"fetch failed, the server is retrying: {frame.error}")

    def _closed_error(self) -> QueenConnectionError:
        return QueenConnectionError("connection closed", "GET", self._url)
