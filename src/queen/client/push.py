"""`queue(...).push(...)`: at once, or through a buffer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

import msgspec

from queen.client.buffers import Buffers
from queen.client.errors import PushError, QueenError
from queen.client.http import HttpClient, decode_as, encode_json
from queen.client.ids import TransactionIds
from queen.client.items import listed, wire_item
from queen.client.log import ClientLog
from queen.client.messages import BufferOptions, ErrorCallback, Items

PATH = "/api/v1/push"

_results = msgspec.json.Decoder(list[dict[str, Any]])

PushCallback = Callable[[Any], Awaitable[object]]


class Pusher:
    """What every push of a client shares."""

    def __init__(self, http: HttpClient, buffers: Buffers, ids: TransactionIds, log: ClientLog) -> None:
        self.http = http
        self.buffers = buffers
        self.ids = ids
        self.log = log


class Push:
    """A push that happens when it is awaited; callbacks may be hung on before."""

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
        self._items = listed(items)
        self._buffer_options = buffer_options
        self._on_success: PushCallback | None = None
        self._on_error: ErrorCallback | None = None
        self._on_duplicate: ErrorCallback | None = None

    def on_success(self, callback: PushCallback) -> Push:
        """Await `callback(items)` with the items that were queued (or buffered), each with its `result`."""
        self._on_success = callback
        return self

    def on_error(self, callback: ErrorCallback) -> Push:
        """Await `callback(items, error)` with the items that were refused, instead of raising."""
        self._on_error = callback
        return self

    def on_duplicate(self, callback: ErrorCallback) -> Push:
        """Await `callback(items, error)` with the items whose transaction id was there before."""
        self._on_duplicate = callback
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        """The server's result for each item, in order; `{"buffered": True, "count": n}` when they were buffered."""
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
            # The common case takes no step of the event loop: a coroutine per message would cost more than the rest.
            if buffer.is_full:
                yield from pusher.buffers.add_when_there_is_room(
                    self._queue, self._partition, self._buffer_options, formatted
                ).__await__()
            elif buffer.add(formatted):
                yield from buffer.begin_sending().__await__()
        if self._on_success is not None:
            yield from self._on_success(self._items).__await__()
        return {"buffered": True, "count": len(self._items)}

    async def _send(self) -> Any:
        items = [wire_item(item, self._queue, self._partition, self._pusher.ids) for item in self._items]
        try:
            answer = await self._pusher.http.send("POST", PATH, encode_json({"items": items}))
        except QueenError as error:
            if self._on_error is None:
                raise
            await self._on_error(items, error)
            return None
        results = decode_as(_results, answer.body)
        if answer.attempts > 1:
            self._own_duplicates(results)
        await self._tell(items, results)
        return results

    def _own_duplicates(self, results: list[dict[str, Any]]) -> None:
        """A repeated request finds what its lost predecessor stored: where the id is ours, it was queued just now."""
        for item, result in zip(self._items, results, strict=True):
            if result["status"] == "duplicate" and not item.get("transactionId"):
                result["status"] = "queued"

    async def _tell(self, items: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
        unheard = self._on_success is None and self._on_duplicate is None
        if unheard and all(result["status"] != "failed" for result in results):
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
