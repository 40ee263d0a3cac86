"""A server at a URL."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from queen.streams.broker import PopRequest
from queen.streams.errors import StreamsHttpError
from queen.streams.records import Message

_RETRIED = frozenset({408, 429})
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_JITTER = 0.3
_MORE_THAN_WAITED = 5.0

_encode = msgspec.json.encode
_decode = msgspec.json.decode


class HttpBroker:
    """Talks to one server; what fails for want of it is tried again, and harmless if it had come through."""

    def __init__(
        self, url: str, bearer_token: str | None = None, *, timeout_ms: int = 30_000, retry_attempts: int = 3
    ) -> None:
        if not url:
            raise ValueError("a stream needs the url of a server, such as http://localhost:6632")
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
                lasting = error.status is not None and error.status < 500 and error.status not in _RETRIED
                if lasting or attempt >= self._retries:
                    raise
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt)
            await asyncio.sleep(pause * (1 + random.random() * _JITTER))
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
        path = f"/api/v1/pop/queue/{quote(queue, safe='')}"
        answer = await self._request("GET", path, request.wait_ms / 1000 + _MORE_THAN_WAITED, params=query)
        messages = answer.get("messages") if isinstance(answer, dict) else None
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
            raise StreamsHttpError(f"{method} {path} was not answered: {error or type(error).__name__}") from error
        answer = _read(content)
        if 200 <= status < 300:
            return answer
        said = answer.get("error") if isinstance(answer, dict) else None
        raise StreamsHttpError(str(said or f"HTTP {status}"), status, answer)


def _read(content: bytes) -> Any:
    if not content:
        return None
    try:
        return _decode(content)
    except msgspec.DecodeError:
        return {"raw": content.decode(errors="replace")}
