"""Limits of single requests: items that cost far more memory and time than their bytes are counted first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from queen.errors import BadRequest, Overloaded
from queen.http.server.message import Handler, Request, Response, error_response
from queen.settings import Settings
from queen.wire.binary.push import MAGIC, TRANSACTION_MAGIC, unpacked_bytes
from queen.wire.decode import malformed
from queen.wire.topics.requests import MOST_ITEMS

# A shorter body is not counted: it cannot hold more items than any sensible limit.
_SHORT: Final = 64 * 1024
# An item that names its queue, topic or message takes more bytes than this.
_SMALLEST_ITEM: Final = 8
# Bodies of requests that are no lists of messages: what they hold is decoded to objects, many times as large.
_MOST_BYTES: Final = 4 << 20
_LISTS: Final = frozenset(
    {
        "/api/v1/stages",
        "/api/v1/traces",
        "/streams/v1/cycle",
        "/streams/v1/state/get",
        "/internal/api/events",
        "/internal/api/notify",
    }
)
_STEP: Final = 1 << 20
_TOPICS: Final = "/api/v1/topics"
_TOPIC_LISTS: Final = ("/enqueue", "/ack", "/nack", "/extend")


class _PushBody(msgspec.Struct):
    items: list[msgspec.Raw] = []


class _AckBody(msgspec.Struct):
    acknowledgments: list[msgspec.Raw] = []


class _Operation(msgspec.Struct):
    items: list[msgspec.Raw] = []


class _TransactionBody(msgspec.Struct):
    operations: list[_Operation] = []


_push = msgspec.json.Decoder(_PushBody)
_acks = msgspec.json.Decoder(_AckBody)
_transaction = msgspec.json.Decoder(_TransactionBody)
_array = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class _Limit:
    most: int
    setting: str
    count: Callable[[bytes], int]
    braces: int
    """How many there are before that of the first item."""
    end: bytes
    """What closes a body after an item."""

    def counted(self, body: bytes) -> int:
        """How many items a body has, or its beginning, if those are too many already; 0: surely not too many."""
        if len(body) <= self.most * _SMALLEST_ITEM:
            return 0
        # Each item has a brace of its own; where there are fewer, nothing need be decoded.
        most, seen = self.braces + self.most, 0
        for start in range(0, len(body), _STEP):
            found = body.count(b"{", start, start + _STEP)
            if seen + found > most + 1:
                # Items without objects inside are the rule where there are very many: the first of them are enough.
                after = body[start : start + _STEP].split(b"{", most + 2 - seen)[-1]
                beginning = body[: start + min(_STEP, len(body) - start) - len(after) - 1].rstrip(b" \t\r\n,")
                with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    count = self.count(beginning + self.end)
                    if count > self.most:
                        return count
                break
            seen += found
        else:
            if seen <= most:
                return 0
        return self.count(body)


class RequestLimits:
    """Refuses requests that exceed the limits of the settings, before they are decoded."""

    def __init__(self, settings: Settings) -> None:
        self._most_each = settings.body_bytes
        self._limits = {
            "/api/v1/push": _Limit(settings.max_push_items, " (MAX_PUSH_ITEMS)", _count_items, 1, b"]}"),
            "/api/v1/ack/batch": _Limit(settings.max_ack_items, " (MAX_ACK_ITEMS)", _count_acks, 1, b"]}"),
            "/api/v1/transaction": _Limit(
                settings.max_transaction_operations, " (MAX_TRANSACTION_OPERATIONS)", _count_operations, 1, b"]}"
            ),
        }
        items = _Limit(MOST_ITEMS, "", _count_array, 0, b"]")
        self._limits |= {prefix + path: items for path in _TOPIC_LISTS for prefix in ("", _TOPICS)}
        shortest = min(limit.most for limit in self._limits.values())
        self.looks_from = min(_SHORT, shortest * _SMALLEST_ITEM)
        """A body that is shorter than this number of bytes is within the limits."""

    def refusal(self, request: Request) -> Response | None:
        """The response to a request that exceeds a limit; None where it exceeds none."""
        route, body = request.route, request.body
        if route is None:
            return None
        if route.pattern in UNPACKED and body.startswith((MAGIC, TRANSACTION_MAGIC)):
            # Their decoder counts. It may be asked by the guard first, for the queues that they name.
            try:
                return self._refusal_unpacked(body)
            except BadRequest as error:
                return error_response(400, str(error))
        limit = self._limits.get(route.pattern)
        if limit is None:
            if len(body) <= _MOST_BYTES or route.pattern in _LISTS:
                return None
            return error_response(413, f"The request body is larger than the {_MOST_BYTES} bytes allowed here")
        try:
            count = limit.counted(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_response(400, str(malformed(error)))
        if count <= limit.most:
            return None
        return error_response(
            413, f"The request has more than the {limit.most} items allowed{limit.setting}: send several requests"
        )

    def _refusal_unpacked(self, body: bytes) -> Response | None:
        return _too_large_unpacked(self._most_each) if unpacked_bytes(body) > self._most_each else None


UNPACKED: Final = frozenset({"/api/v1/push", "/api/v1/transaction"})
"""Routes whose bodies may be compressed."""


class Unpacking:
    """What compressed bodies take once they are unpacked, which counts beside the bytes that came."""

    def __init__(self, settings: Settings) -> None:
        self._most_each = settings.body_bytes
        self._most = settings.unpacked_bytes
        self._held = 0

    def around(self, handler: Handler) -> Handler:
        """The handler, once there is room for what it will unpack."""

        def serve(request: Request) -> Response | Awaitable[Response]:
            if request.body.startswith((MAGIC, TRANSACTION_MAGIC)):
                return self._serve(request, handler)
            return handler(request)

        return serve

    def _serve(self, request: Request, handler: Handler) -> Response | Awaitable[Response]:
        nbytes = unpacked_bytes(request.body)
        if nbytes > self._most_each:
            return _too_large_unpacked(self._most_each)
        if self._held and self._held + nbytes > self._most:
            raise Overloaded("the server holds too many request bodies just now; nothing was done, try again soon")
        self._held += nbytes
        try:
            result = handler(request)
        except BaseException:
            self._held -= nbytes
            raise
        if isinstance(result, Response):
            self._held -= nbytes
            return result
        future = asyncio.ensure_future(result)
        future.add_done_callback(lambda _: self._give_back(nbytes))
        return future

    def _give_back(self, nbytes: int) -> None:
        self._held -= nbytes


def _too_large_unpacked(most: int) -> Response:
    return error_response(413, f"The request body unpacks to more than the {most} bytes allowed")


def _count_items(body: bytes) -> int:
    return len(_push.decode(body).items)


def _count_acks(body: bytes) -> int:
    return len(_acks.decode(body).acknowledgments)


def _count_operations(body: bytes) -> int:
    return sum(max(1, len(operation.items)) for operation in _transaction.decode(body).operations)


def _count_array(body: bytes) -> int:
    return len(_array.decode(body)) if body.lstrip()[:1] == b"[" else 1
