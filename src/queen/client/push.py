"""`queue(...).push(...)`: directly, or through a buffer."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

import msgspec

from queen.client.buffer import Buffers
from queen.client.config import ClientLog
from queen.client.errors import PushError, QueenError
from queen.client.http import HttpClient, decode_as, encode_json
from queen.client.types import BufferOptions, Deferred, ErrorCallback, Items
from queen.wire.ids import IdSource

# Blocks are small enough that the timestamp in the ids stays close to the time of the push.
_BLOCK_SIZE = 1024


class TransactionIds:
    """Generates unique, ascending transaction ids from blocks of UUIDs."""

    __slots__ = ("_left", "_low", "_pid", "_prefix", "_source")

    def __init__(self) -> None:
        self._pid = 0
        self._left = 0
        self._low = 0
        self._prefix = ""
        self._source = IdSource()

    def next(self) -> str:
        # A forked process must not continue the block of its parent.
        if not self._left or self._pid != os.getpid():
            self._renew()
        self._left -= 1
        self._low += 1
        return f"{self._prefix}{self._low:012x}"

    def _renew(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._source = IdSource()
        block = self._source.block(_BLOCK_SIZE)
        self._prefix, self._low, self._left = block.prefix.decode(), block.low - 1, _BLOCK_SIZE


_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)


def as_items(items: Items) -> list[Mapping[str, Any]]:
    """One or several items as a list; raises TypeError, with the index, for what is not a dict."""
    # The common case; isinstance with an abstract class costs more than the rest of this function.
    if type(items) is list and all(type(item) is dict for item in items):
        return items
    if isinstance(items, Mapping):
        return [items]
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        raise TypeError(f"push takes a dict or a list of dicts like {{'data': ...}}, not {type(items).__name__}")
    items = list(items)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TypeError(f"item {index} to push must be a dict like {{'data': ...}}, not {type(item).__name__}")
    return items


def wire_item(item: Mapping[str, Any], queue: str, partition: str | None, ids: TransactionIds) -> dict[str, Any]:
    """The item in wire format; its payload is `data`, else `payload`, else the whole item."""
    if "data" in item:
        payload = item["data"]
    elif "payload" in item:
        payload = item["payload"]
    else:
        payload = item
    formatted: dict[str, Any] = {
        "queue": queue,
        "payload": payload,
        "transactionId": item.get("transactionId") or ids.next(),
    }
    if partition is not None:
        formatted["partition"] = partition
    trace_id = item.get("traceId")
    if trace_id and isinstance(trace_id, str) and _UUID.fullmatch(trace_id):
        formatted["traceId"] = trace_id
    return formatted


PATH = "/api/v1/push"

_results = msgspec.json.Decoder(list[dict[str, Any]])

PushCallback = Callable[[Any], Awaitable[object]]


class Pusher:
    """The components shared by all pushes of a client."""

    def __init__(self, http: HttpClient, buffers: Buffers, ids: TransactionIds, log: ClientLog) -> None:
        self.http = http
        self.buffers = buffers
        self.ids = ids
        self.log = log


class Push(Deferred[Any]):
    """A push, performed when it is awaited; callbacks can be added before."""

    __slots__ = (
        "_buffer_options",
        "_items",
        "_on_duplicate",
        "_on_error",
        "_on_success",
        "_partition",
        "_pusher",
        "_queue",
    )

    def __init__(
        self, pusher: Pusher, queue: str, partition: str, items: Items, buffer_options: BufferOptions | None
    ) -> None:
        self._pusher = pusher
        self._queue = queue
        self._partition = partition
        self._items = as_items(items)
        self._buffer_options = buffer_options
        self._on_success: PushCallback | None = None
        self._on_error: ErrorCallback | None = None
        self._on_duplicate: ErrorCallback | None = None

    def on_success(self, callback: PushCallback) -> Push:
        """Await `callback(items)` with the queued (or buffered) items, each with its `result`."""
        self._on_success = callback
        return self

    def on_error(self, callback: ErrorCallback) -> Push:
        """Await `callback(items, error)` with the rejected items, instead of raising."""
        self._on_error = callback
        return self

    def on_duplicate(self, callback: ErrorCallback) -> Push:
        """Await `callback(items, error)` with the duplicates, by transaction id."""
        self._on_duplicate = callback
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        """The server's result for each item, in order; `{"buffered": True, "count": n}` for a buffered push."""
        if self._pusher.log.enabled:
            self._pusher.log.info(
                "QueueBuilder.push", queue=self._queue, partition=self._partition, count=len(self._items)
            )
        if self._buffer_options is None:
            return (yield from self._send().__await__())
        pusher = self._pusher
        for item in self._items:
            formatted = encode_json(wire_item(item, self._queue, self._partition, pusher.ids))
            buffer = pusher.buffers.open(self._queue, self._partition, self._buffer_options)
            # No coroutine in the common case: one per message would cost more than the rest.
            if buffer.is_full:
                yield from pusher.buffers.add_when_not_full(
                    self._queue, self._partition, self._buffer_options, formatted
                ).__await__()
            elif buffer.add(formatted):
                yield from buffer.start_flush().__await__()
        if self._on_success is not None:
            yield from self._on_success(self._items).__await__()
        return {"buffered": True, "count": len(self._items)}

    async def _send(self) -> Any:
        items = [wire_item(item, self._queue, self._partition, self._pusher.ids) for item in self._items]
        try:
            response = await self._pusher.http.send("POST", PATH, encode_json({"items": items}))
        except QueenError as error:
            if self._on_error is None:
                raise
            await self._on_error(items, error)
            return None
        results = decode_as(_results, response.body)
        if response.attempts > 1:
            self._mark_own_duplicates_queued(results)
        await self._run_callbacks(items, results)
        return results

    def _mark_own_duplicates_queued(self, results: list[dict[str, Any]]) -> None:
        """After a retry, a duplicate with an id generated here was stored by the attempt whose response was lost."""
        for item, result in zip(self._items, results, strict=True):
            if result["status"] == "duplicate" and not item.get("transactionId"):
                result["status"] = "queued"

    async def _run_callbacks(self, items: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
        no_callbacks = self._on_success is None and self._on_duplicate is None
        if no_callbacks and all(result["status"] != "failed" for result in results):
            return
        queued, duplicates, failed = (
            [_with_result(item, one) for item, one in zip(items, results, strict=True) if one["status"] == status]
            for status in ("queued", "duplicate", "failed")
        )
        if duplicates and self._on_duplicate is not None:
            await self._on_duplicate(duplicates, PushError("Duplicate transaction IDs detected", duplicates))
        error = PushError(failed[0]["error"] or "Push failed", failed) if failed else None
        if error and self._on_error is not None:
            await self._on_error(failed, error)
        if queued and self._on_success is not None:
            await self._on_success(queued)
        if error and self._on_error is None:
            raise error


def _with_result(item: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    return {**item, "result": result, "error": result.get("error")}
