"""HTTP requests of topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from queen.client.consume.acks import AckResult
from queen.client.consume.transport import GRACE_SECONDS
from queen.client.errors import LeaseLostError, NotFoundError, QueenConnectionError, RequestError
from queen.client.http import HttpClient, Response, decode_as, decode_json, encode_json
from queen.client.topics.items import ItemRef, ItemRefs, TopicItem, decode_items

PATH: Final = "/api/v1/topics"
NOT_LEASED: Final = "Item not found or not leased"


@dataclass(frozen=True, slots=True)
class TopicSource:
    """What is dequeued: one topic, several, or (without names) all topics of a namespace."""

    namespace: str
    names: tuple[str, ...]

    @property
    def affinity_key(self) -> str:
        """Load balancing key: consumers of the same topics use the same server."""
        return f"{self.namespace}:{','.join(self.names) or '*'}"

    @property
    def address(self) -> str:
        """The query string that names one topic."""
        return urlencode({"namespace": self.namespace, "topic": self.names[0]}, quote_via=quote)

    def path(self, limit: int, timeout_millis: int | None, lease: float | None) -> str:
        """The path and query of a dequeue; without `timeout_millis` it is no long poll."""
        query: dict[str, str | int | float] = {"namespace": self.namespace, "limit": limit}
        if len(self.names) == 1:
            query["topic"] = self.names[0]
        elif self.names:
            query["topics"] = encode_json(self.names).decode()
        if timeout_millis is not None:
            query |= {"wait": "true", "timeout": timeout_millis}
        if lease is not None:
            query["lease"] = lease
        route = "dequeue" if len(self.names) == 1 else "dequeue/many"
        return f"{PATH}/{route}?{urlencode(query, quote_via=quote)}"


class Settled(AckResult):
    """Result for one item of an ack, nack, extend or release."""

    id: int = 0
    dlq: bool = False
    retry_in_seconds: float = 0.0
    lease_expires_at: str = ""


_ids = msgspec.json.Decoder(list[int])
_settled = msgspec.json.Decoder(list[Settled])


class TopicCalls:
    """Requests of topics. All raise `RequestError`."""

    def __init__(self, http: HttpClient) -> None:
        self.http = http

    async def enqueue(self, items: Sequence[Mapping[str, Any]]) -> list[int]:
        """Enqueue items atomically; retried only if all have an idempotency key."""
        if not items:
            return []
        repeatable = all(item.get("idempotency_key") for item in items)
        response = await self.http.send(
            "POST", f"{PATH}/enqueue", encode_json(items), attempts=None if repeatable else 1
        )
        return decode_as(_ids, response.body)

    async def dequeue(
        self,
        source: TopicSource,
        limit: int,
        timeout_millis: int | None,
        lease: float | None,
        *,
        attempts: int | None = None,
    ) -> list[TopicItem]:
        """Lease up to `limit` items; empty after the timeout."""
        response = await self.http.send(
            "GET",
            source.path(limit, timeout_millis, lease),
            seconds=None if timeout_millis is None else timeout_millis / 1000 + GRACE_SECONDS,
            affinity_key=source.affinity_key,
            attempts=attempts,
        )
        return decode_items(response.body)

    async def settle(
        self, verb: str, refs: Sequence[Mapping[str, Any]], *, attempts: int | None = None
    ) -> list[Settled]:
        """`ack`, `nack`, `extend` or `release` items; returns the result for each."""
        if not refs:
            return []
        return decode_as(_settled, (await self._post(verb, refs, attempts)).body)

    async def settle_all(self, verb: str, refs: Sequence[Mapping[str, Any]]) -> list[Settled]:
        """As `settle`, but raises if one of them failed: `LeaseLostError`, for dead letters `NotFoundError`."""
        if not refs:
            return []
        response = await self._post(verb, refs, None)
        results = decode_as(_settled, response.body)
        rejected = [result for result in results if not result.success]
        if rejected:
            raise self._rejection(verb, rejected, len(refs), response.attempts)
        return results

    async def get(self, path: str, **query: str | int | None) -> Any:
        """The decoded response of a GET; parameters that are None are omitted."""
        return decode_json((await self.get_raw(path, **query)).body)

    async def get_raw(self, path: str, **query: str | int | None) -> Response:
        asked = urlencode({name: value for name, value in query.items() if value is not None}, quote_via=quote)
        return await self.http.send("GET", f"{PATH}{path}?{asked}")

    async def _post(self, verb: str, refs: Sequence[Mapping[str, Any]], attempts: int | None) -> Response:
        return await self.http.send("POST", f"{PATH}/{verb}", encode_json(refs), attempts=attempts)

    def _rejection(self, verb: str, rejected: Sequence[Settled], count: int, attempts: int) -> RequestError:
        shown = ", ".join(str(result.id) for result in rejected[:5]) + (", …" if len(rejected) > 5 else "")
        text = f"{rejected[0].error} ({len(rejected)} of {count}: {shown})"
        if attempts > 1:
            # After a retry, an item settled by the lost attempt cannot be distinguished from one whose lease is lost.
            return QueenConnectionError(f"the response to a request was lost, it may have been applied: {text}")
        if rejected[0].error != NOT_LEASED:
            return NotFoundError(text, "POST", f"{PATH}/{verb}")
        lost = LeaseLostError(text, "POST", f"{PATH}/{verb}")
        lost.ids = tuple(result.id for result in rejected)
        return lost


def refs_of(given: ItemRefs, source: TopicSource) -> list[dict[str, Any]]:
    """Items as references of a request; an item has its topic and lease, an id needs the topic of the builder."""
    items: list[ItemRef] = [given] if isinstance(given, int | Mapping) else list(given)
    return [_ref(item, source) for item in items]


def _ref(given: ItemRef, source: TopicSource) -> dict[str, Any]:
    if isinstance(given, Mapping):
        ref = {"id": given["id"], "namespace": given["namespace"], "topic": given["topic"]}
        owner = given.get("lease_owner")
        return {**ref, "lease_owner": owner} if owner else ref
    if len(source.names) != 1:
        raise ValueError(f"the id {given} does not say which topic it belongs to: pass the item, or name one topic")
    return {"id": given, "namespace": source.namespace, "topic": source.names[0]}
