"""Requests to one or several servers, with retries and failover."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, TypeVar

import aiohttp
import msgspec
from yarl import URL

from queen.client.config import ClientConfig, ClientLog, Strategy
from queen.client.errors import (
    ClientClosedError,
    OverloadedError,
    QueenConnectionError,
    QueenTimeoutError,
    RequestError,
    ServerError,
    error_of_status,
)
from queen.errors import QueenError

_FNV_OFFSET = 2_166_136_261
_FNV_PRIME = 16_777_619
_CACHED_KEYS = 4096


class Balancer:
    """Orders the servers for each request: the selected one first, recently failed ones last."""

    def __init__(
        self,
        urls: Sequence[str],
        strategy: Strategy,
        virtual_nodes: int,
        cooldown_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A failed server is tried last for `cooldown_seconds`."""
        self._urls = tuple(dict.fromkeys(urls))
        self._strategy = strategy
        self._cooldown_seconds = cooldown_seconds
        self._clock = clock
        self._unhealthy_until: dict[str, float] = {}
        self._next_index = 0
        # Requests without a key use one server per client.
        self._own_key = uuid.uuid4().hex
        ring = sorted((fnv1a(f"{url}#vnode{number}"), url) for url in self._urls for number in range(virtual_nodes))
        self._hashes = [position for position, _ in ring]
        self._ring = [url for _, url in ring]
        self._ring_order = lru_cache(_CACHED_KEYS)(self._walk_ring)

    def order(self, key: str | None = None) -> tuple[str, ...]:
        """All servers, in the order to try them for a request with this key."""
        if len(self._urls) == 1:
            return self._urls
        order = self._by_strategy(key or self._own_key)
        if not self._unhealthy_until:
            return order
        now = self._clock()
        return tuple(sorted(order, key=lambda url: self._unhealthy_until.get(url, 0.0) > now))

    def mark_failed(self, url: str) -> None:
        """Mark a server as failed."""
        self._unhealthy_until[url] = self._clock() + self._cooldown_seconds

    def mark_healthy(self, url: str) -> None:
        """Mark a server as healthy."""
        if self._unhealthy_until:
            self._unhealthy_until.pop(url, None)

    def _by_strategy(self, key: str) -> tuple[str, ...]:
        if self._strategy is Strategy.AFFINITY:
            return self._ring_order(key)
        if self._strategy is Strategy.SESSION:
            return self._rotated(fnv1a(key))
        self._next_index += 1
        return self._rotated(self._next_index - 1)

    def _rotated(self, start: int) -> tuple[str, ...]:
        start %= len(self._urls)
        return self._urls[start:] + self._urls[:start]

    def _walk_ring(self, key: str) -> tuple[str, ...]:
        start = bisect_left(self._hashes, fnv1a(key))
        return tuple(dict.fromkeys(self._ring[start:] + self._ring[:start]))


def fnv1a(text: str) -> int:
    """The 32-bit FNV-1a hash over the characters; all clients of a queue must compute the same."""
    value = _FNV_OFFSET
    for character in text:
        value = (value ^ ord(character)) * _FNV_PRIME & 0xFFFFFFFF
    return value


_CONNECT_SECONDS = 10.0
# Short, so that a recovered server is used soon; a Retry-After of the server may be longer.
_MAX_RETRY_DELAY_SECONDS = 5.0
_MAX_RETRY_AFTER_SECONDS = 60.0
# Headers that aiohttp adds and the server does not read.
_SKIPPED_HEADERS = ("User-Agent", "Accept", "Accept-Encoding")
_READ_BUFFER_BYTES = 256 * 1024

T = TypeVar("T")

_any = msgspec.json.Decoder()
# What a server takes, and room for it on a stack.
_DEEPEST = 20_000
_DEEP_STACK_BYTES = 64 << 20
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Response:
    """The body of a 2xx response, and the number of attempts it took."""

    body: bytes
    attempts: int


class HttpClient:
    """Sends requests, with retries and failover to other servers."""

    def __init__(self, config: ClientConfig, log: ClientLog) -> None:
        self._config = config
        self._log = log
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.balancer = Balancer(
            config.urls,
            config.load_balancing_strategy,
            config.affinity_hash_ring,
            config.health_retry_after_millis / 1000,
        )
        self.check_certificates = not config.insecure
        self.headers = {"Content-Type": "application/json"}
        if config.bearer_token:
            self.headers["Authorization"] = f"Bearer {config.bearer_token}"
        self.headers.update(config.headers)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_millis: int | None = None,
        affinity_key: str | None = None,
    ) -> Any:
        """Send `body` as JSON (no body if None), and return the decoded response (None if empty).

        Raises `RequestError`.
        """
        data = None if body is None else encode_json(body)
        seconds = None if timeout_millis is None else timeout_millis / 1000
        response = await self.send(method, path, data, seconds=seconds, affinity_key=affinity_key)
        return decode_json(response.body)

    async def send(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        *,
        seconds: float | None = None,
        affinity_key: str | None = None,
        attempts: int | None = None,
    ) -> Response:
        """Send encoded JSON to a quoted path; `seconds` is the timeout of one attempt."""
        limit = aiohttp.ClientTimeout(
            total=self._config.timeout_millis / 1000 if seconds is None else seconds, sock_connect=_CONNECT_SECONDS
        )
        rounds = self._config.retry_attempts if attempts is None else attempts
        tried = 0
        for number in range(1, rounds + 1):
            failure: RequestError | None = None
            for url in self._candidates(affinity_key):
                tried += 1
                try:
                    body = await self._once(method, url + path, data, limit)
                except (QueenConnectionError, OverloadedError, ServerError) as error:
                    failure = error
                    self.balancer.mark_failed(url)
                    self._log.info("HttpClient.failed", method=method, url=url + path, error=str(error), attempt=tried)
                else:
                    self.balancer.mark_healthy(url)
                    return Response(body, tried)
            assert failure is not None
            if number == rounds:
                raise failure
            await asyncio.sleep(self.retry_delay(number, failure))
        raise AssertionError("retry_attempts is at least 1")

    def retry_delay(self, failures: int, error: RequestError) -> float:
        """Seconds until the next attempt: exponential backoff with jitter, at least the server's Retry-After."""
        doubled: float = self._config.retry_delay_millis / 1000 * 2 ** min(failures - 1, 16)
        seconds = min(doubled, _MAX_RETRY_DELAY_SECONDS) * random.uniform(0.8, 1.2)
        if isinstance(error, OverloadedError) and error.retry_after is not None:
            return max(seconds, min(error.retry_after, _MAX_RETRY_AFTER_SECONDS))
        return seconds

    async def close(self) -> None:
        """Close the connections; later requests raise `ClientClosedError`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _candidates(self, key: str | None) -> tuple[str, ...]:
        order = self.balancer.order(key)
        return order if self._config.enable_failover else order[:1]

    async def _once(self, method: str, url: str, data: bytes | None, limit: aiohttp.ClientTimeout) -> bytes:
        session = self._session
        if session is None or self._loop is not asyncio.get_running_loop():
            session = await self._open()
        if self._log.enabled:
            self._log.info("HttpClient.request", method=method, url=url)
        try:
            async with session.request(
                method, URL(url, encoded=True), data=data, timeout=limit, allow_redirects=False
            ) as response:
                body = await response.read()
                if response.status < 300:
                    return body
                retry_after = response.headers.get("Retry-After", "")
                raise error_of_status(response.status, response.reason or "", body, retry_after, method, url)
        except TimeoutError as error:
            raise QueenTimeoutError(f"request timed out after {limit.total} s", method, url) from error
        except (aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            raise QueenConnectionError(f"connection failed: {what}", method, url) from error

    async def _open(self) -> aiohttp.ClientSession:
        """A session of the running event loop; a client may outlive a loop, as in notebooks."""
        if self._closed:
            raise ClientClosedError("the Queen client is closed; create a new one")
        if self._session is not None:
            await self._session.close()
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self.check_certificates),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self.headers,
            skip_auto_headers=_SKIPPED_HEADERS,
            read_bufsize=_READ_BUFFER_BYTES,
        )
        return self._session


def encode_json(value: Any) -> bytes:
    """Encode as JSON; dates, UUIDs, enums and dataclasses become strings and objects."""
    return _encode(value)


def decode_json(body: bytes) -> Any:
    """Decode a JSON body; None if empty, text if it is not JSON."""
    if not body:
        return None
    try:
        return decode_unusual(_any, body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")


def decode_unusual(decoder: msgspec.json.Decoder[T], body: bytes | str) -> T:
    """Decode also what `msgspec` does not, or only on a larger stack: servers store any JSON, and consumers get it.

    Numbers that are too long or too large become `Decimal`. Raises `msgspec.DecodeError`, and `QueenError` for what is
    nested too deeply for this version of Python.
    """
    try:
        return decoder.decode(body)
    except RecursionError:
        return _decode_nested(partial(_decode_any_number, decoder), body)
    except msgspec.ValidationError:
        try:
            return _decode_any_number(decoder, body)
        except RecursionError:
            return _decode_nested(partial(_decode_any_number, decoder), body)


def _decode_any_number(decoder: msgspec.json.Decoder[T], body: bytes | str) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        read = json.loads(body, parse_int=_read_integer, parse_float=_read_float)
        return msgspec.convert(read, decoder.type)


def _read_integer(digits: str) -> int | Decimal:
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


def _read_float(digits: str) -> float | Decimal:
    value = float(digits)
    return Decimal(digits) if math.isinf(value) else value


def _decode_nested(decode: Callable[[bytes | str], T], body: bytes | str) -> T:
    decoded: list[T] = []
    failed: list[msgspec.DecodeError] = []

    def work() -> None:
        try:
            decoded.append(decode(body))
        except RecursionError:
            pass
        except msgspec.DecodeError as error:
            failed.append(error)

    limit, stack = sys.getrecursionlimit(), threading.stack_size(_DEEP_STACK_BYTES)
    sys.setrecursionlimit(max(limit, _DEEPEST))
    try:
        thread = threading.Thread(target=work, name="queen-decode")
        thread.start()
        thread.join()
    finally:
        threading.stack_size(stack)
        sys.setrecursionlimit(limit)
    if failed:
        raise failed[0]
    if not decoded:
        raise QueenError("a message is nested too deeply to be decoded")
    return decoded[0]


def decode_as(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a response of a known type; proxies may respond with something else."""
    try:
        return decode_unusual(decoder, body)
    except msgspec.DecodeError as error:
        raise ServerError(f"unexpected response, not from a Queen server: {error}: {body[:200]!r}") from error
