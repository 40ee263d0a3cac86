"""The connection of a stream to a server, and the source it pops from."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from queen.streams.errors import StreamsHttpError
from queen.streams.records import Message, queue_name_of
from queen.wire.paths import path_of


@dataclass(frozen=True, slots=True)
class PopRequest:
    """Parameters of a pop from the source."""

    group: str
    batch: int
    partitions: int
    wait_ms: int
    subscription_mode: str | None = None
    subscription_from: str | None = None


class Broker(Protocol):
    """A connection to a Queen server."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON, return the decoded response. Raises `StreamsHttpError` if its status is not 2xx."""
        ...

    async def pop(self, queue: str, request: PopRequest) -> list[Message]:
        """Lease messages with a long poll; empty after the timeout."""
        ...

    async def close(self) -> None: ...


class Source(Protocol):
    """The source of a stream."""

    async def pop(self, request: PopRequest) -> list[Message]: ...


class BrokerSource:
    """A queue by its name, popped through the broker."""

    def __init__(self, broker: Broker, queue: str) -> None:
        self._broker = broker
        self._queue = queue

    async def pop(self, request: PopRequest) -> list[Message]:
        return await self._broker.pop(self._queue, request)


class BuilderSource:
    """`queen.queue("name")` of a client, popped through that client."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    async def pop(self, request: PopRequest) -> list[Message]:
        builder = self._builder.batch(request.batch).wait(True).timeout_millis(request.wait_ms).group(request.group)
        if request.partitions > 1:
            builder = builder.partitions(request.partitions)
        if request.subscription_mode:
            builder = builder.subscription_mode(request.subscription_mode)
        if request.subscription_from:
            builder = builder.subscription_from(request.subscription_from)
        popped = builder.pop()
        messages = await popped if inspect.isawaitable(popped) else popped
        return list(messages or [])


def source_of(queue: Any, broker: Broker) -> Source:
    """The source for a queue builder of a client, or for a queue name."""
    if not isinstance(queue, str) and hasattr(queue, "pop") and hasattr(queue, "batch"):
        return BuilderSource(queue)
    return BrokerSource(broker, queue_name_of(queue))


_RETRIED = frozenset({408, 429})
_MIN_RETRY_DELAY = 0.1
_MAX_RETRY_DELAY = 5.0
_JITTER = 0.3
_RESPONSE_GRACE_SECONDS = 5.0

_encode = msgspec.json.encode
_decode = msgspec.json.decode


class HttpBroker:
    """An HTTP connection to one server. Requests are retried, which is safe: they are idempotent."""

    def __init__(
        self, url: str, bearer_token: str | None = None, *, timeout_ms: int = 30_000, retry_attempts: int = 3
    ) -> None:
        if not url:
            raise ValueError("run() requires the url of a server, such as http://localhost:6632")
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if bearer_token:
            self._headers["Authorization"] = f"Bearer {bearer_token}"
        self._timeout = timeout_ms / 1000
        self._retries = retry_attempts
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        data = _encode(body)
        attempt = 0
        while True:
            try:
                return await self._request("POST", path, self._timeout, data=data)
            except StreamsHttpError as error:
                permanent = error.status is not None and error.status < 500 and error.status not in _RETRIED
                if permanent or attempt >= self._retries:
                    raise
            delay = min(_MAX_RETRY_DELAY, _MIN_RETRY_DELAY * 2**attempt)
            await asyncio.sleep(delay * (1 + random.random() * _JITTER))
            attempt += 1

    async def pop(self, queue: str, request: PopRequest) -> list[Message]:
        query = {
            "batch": str(request.batch),
            "wait": "true",
            "timeout": str(request.wait_ms),
            "consumerGroup": request.group,
            "partitions": str(request.partitions),
        }
        if request.subscription_mode:
            query["subscriptionMode"] = request.subscription_mode
        if request.subscription_from:
            query["subscriptionFrom"] = request.subscription_from
        path = path_of("/api/v1/pop/queue", queue)
        response = await self._request("GET", path, request.wait_ms / 1000 + _RESPONSE_GRACE_SECONDS, params=query)
        messages = response.get("messages") if isinstance(response, dict) else None
        return messages if isinstance(messages, list) else []

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, path: str, seconds: float, **options: Any) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.request(method, self._url + path, timeout=timeout, **options) as response:
                status, content = response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise StreamsHttpError(f"{method} {path} failed: {str(error) or type(error).__name__}") from error
        decoded = _read(content)
        if 200 <= status < 300:
            return decoded
        message = decoded.get("error") if isinstance(decoded, dict) else None
        raise StreamsHttpError(str(message or f"HTTP {status}"), status, decoded)


def _read(content: bytes) -> Any:
    if not content:
        return None
    try:
        return _decode(content)
    except msgspec.DecodeError:
        return {"raw": content.decode(errors="replace")}
