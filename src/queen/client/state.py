"""State beside the messages: `queen.kv`, `queen.lock`, `queen.timers`, `queen.ephemeral` and `queen.fetch`."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from queen.client.errors import LockLostError, QueenError
from queen.client.http import HttpClient
from queen.wire.paths import path_of

_RENEWALS = 3
"""Renewals of a lock within its time to live."""
_WAIT_SLACK_MILLIS = 5000
"""A request outlives the time that the server waits by this."""


def put(key: str, value: Any, ttl: int | None, expect: int | None) -> dict[str, Any]:
    """The operation that writes a key."""
    return {"op": "put", "key": key, "value": value} | _expiry(ttl) | _expected(expect)


def put_if_absent(key: str, value: Any, ttl: int | None) -> dict[str, Any]:
    """The operation that writes a key that does not exist."""
    return {"op": "putIfAbsent", "key": key, "value": value} | _expiry(ttl)


def increment(key: str, delta: int, ttl: int | None) -> dict[str, Any]:
    """The operation that adds to a number."""
    return {"op": "incr", "key": key, "delta": delta} | _expiry(ttl)


def delete(key: str, expect: int | None) -> dict[str, Any]:
    """The operation that deletes a key."""
    return {"op": "delete", "key": key} | _expected(expect)


def schedule(
    queue: str, key: str, data: Any, seconds: float, partition: str | None, transaction_id: str | None
) -> dict[str, Any]:
    """The operation that schedules a timer."""
    payload = b64encode(json.dumps(data, ensure_ascii=False).encode()).decode()
    operation = {"op": "schedule", "payload": payload, "delayMs": round(seconds * 1000)}
    operation |= {"partition": partition} if partition else {}
    operation |= {"txn": transaction_id} if transaction_id else {}
    return {"queue": queue, "timerKey": key} | operation


def cancel(queue: str, key: str) -> dict[str, Any]:
    """The operation that cancels a timer."""
    return {"queue": queue, "timerKey": key, "op": "cancel"}


class KeyValues:
    """The keys of one namespace, which belongs to the queue of its name. Values are JSON."""

    def __init__(self, http: HttpClient, namespace: str) -> None:
        self._http = http
        self._namespace = namespace

    async def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default`."""
        result = await self._run({"op": "get", "key": key})
        return result["value"] if result["found"] else default

    async def entry(self, key: str) -> dict[str, Any]:
        """`found`, and then `value`, `version`, `expiresAt` and `updatedAt`."""
        return await self._run({"op": "get", "key": key})

    async def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that exist."""
        result = await self._run({"op": "getMany", "keys": list(keys)})
        return {row["key"]: row["value"] for row in result["rows"]}

    async def scan(self, prefix: str, *, after: str | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Keys that start with a text, in order, those behind `after`: `key`, `value`, `version` and others of each."""
        operation = {"op": "getPrefix", "prefix": prefix, "limit": limit} | ({} if after is None else {"after": after})
        rows: list[dict[str, Any]] = (await self._run(operation))["rows"]
        return rows

    async def put(self, key: str, value: Any, *, ttl: int | None = None, expect: int | None = None) -> dict[str, Any]:
        """Write a key, for `ttl` seconds or for good; with `expect` only if that is its version (0: none).

        `applied` of the answer says whether it was written, `version` which version it has.
        """
        return await self._run(put(key, value, ttl, expect))

    async def put_if_absent(self, key: str, value: Any, *, ttl: int | None = None) -> bool:
        """Write a key that does not exist; whether it was written."""
        result = await self._run(put_if_absent(key, value, ttl))
        return bool(result["applied"])

    async def incr(self, key: str, delta: int = 1, *, ttl: int | None = None) -> int:
        """Add to a number, which begins at 0; the sum. Only a new key takes the `ttl`."""
        result = await self._run(increment(key, delta, ttl))
        if not result["applied"]:
            why = "holds no number" if result["reason"] == "type" else "would not fit into 63 bits"
            raise QueenError(f"key {key!r} of namespace {self._namespace!r} {why}")
        value: int = result["value"]
        return value

    async def delete(self, key: str, *, expect: int | None = None) -> bool:
        """Delete a key, with `expect` only that version; whether it was there."""
        result = await self._run(delete(key, expect))
        return bool(result["applied"])

    async def _run(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        body = {"operations": [{"ns": self._namespace} | dict(operation)]}
        answer = await self._http.request("POST", "/api/v1/kv", body)
        result: dict[str, Any] = answer["results"][0]
        return result


class Lock:
    """A permit that is renewed while it is held; `limit` of them make a semaphore.

        async with queen.lock("daily-report", ttl=30) as lock:
            ...

    Entering waits until there is a permit. It may be lost while it is held (`lost`): put `guard` into the `kv` of a
    transaction, which then happens only while it is not.
    """

    def __init__(self, http: HttpClient, name: str, ttl: int, limit: int, poll_seconds: float) -> None:
        self._http = http
        self._name = name
        self._ttl = ttl
        self._limit = limit
        self._poll_seconds = poll_seconds
        self._owner = str(uuid.uuid4())
        self._permit: dict[str, Any] | None = None
        # By this program's clock, from before the request that acquired or renewed it.
        self._expires_at = 0.0
        self._renewing: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether it is not held (any more): it was released, taken by another, or not renewed in time."""
        return self._permit is None or time.monotonic() >= self._expires_at

    @property
    def guard(self) -> dict[str, Any]:
        """The operation on keys that has a transaction happen only while the lock is held. Raises `LockLostError`."""
        if self._permit is None or self.lost:
            raise LockLostError(f"lock {self._name!r} is not held")
        found: dict[str, Any] = self._permit["guard"]
        return found

    async def acquire(self, *, wait: bool = True) -> bool:
        """Take a permit; without `wait` only if there is one now."""
        await self._stop_renewing()
        while True:
            expires_at = time.monotonic() + self._ttl
            fields = {"ttlSeconds": self._ttl, "owner": self._owner, "limit": self._limit}
            result = await self._run({"op": "acquire"} | fields)
            if result["acquired"]:
                self._permit, self._expires_at = result, expires_at
                self._renewing = asyncio.get_running_loop().create_task(self._renew())
                return True
            if not wait:
                return False
            await asyncio.sleep(self._poll_seconds)

    async def release(self) -> None:
        """Give the permit back."""
        await self._stop_renewing()
        permit, self._permit = self._permit, None
        if permit is not None:
            await self._run({"op": "release", "token": permit["token"], "slot": permit["slot"]})

    async def _stop_renewing(self) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _renew(self) -> None:
        while self._permit is not None:
            await asyncio.sleep(self._ttl / _RENEWALS)
            permit, expires_at = self._permit, time.monotonic() + self._ttl
            fields = {"token": permit["token"], "slot": permit["slot"], "owner": self._owner, "ttlSeconds": self._ttl}
            try:
                result = await self._run({"op": "renew"} | fields)
            except QueenError:
                # It may be renewed by the next one; whether it expired meanwhile, the server knows.
                continue
            self._permit, self._expires_at = result if result["renewed"] else None, expires_at

    async def _run(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        body = {"operations": [{"name": self._name} | dict(operation)]}
        answer = await self._http.request("POST", "/api/v1/locks", body)
        result: dict[str, Any] = answer["results"][0]
        return result

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release()


class Timers:
    """The timers of one queue: messages that are pushed later, and can be replaced or cancelled until then."""

    def __init__(self, http: HttpClient, queue: str) -> None:
        self._http = http
        self._queue = queue

    async def schedule(
        self, key: str, data: Any, *, seconds: float, partition: str | None = None, transaction_id: str | None = None
    ) -> dict[str, Any]:
        """Push `data` after some seconds, in place of what was scheduled under this key."""
        return await self._run(schedule(self._queue, key, data, seconds, partition, transaction_id))

    async def cancel(self, key: str) -> bool:
        """Push nothing; whether a timer was pending."""
        return bool((await self._run(cancel(self._queue, key)))["ok"])

    async def pending(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """Timers that are pending, by key."""
        path = f"{path_of('/api/v1/timers', self._queue)}?{urlencode({'limit': limit})}"
        timers: list[dict[str, Any]] = (await self._http.request("GET", path))["rows"]
        return timers

    async def _run(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        body = {"operations": [operation]}
        result: dict[str, Any] = (await self._http.request("POST", "/api/v1/timers", body))["results"][0]
        return result


class EphemeralQueue:
    """A queue in unlogged tables: fast, and empty after a crash of PostgreSQL."""

    def __init__(self, http: HttpClient, name: str) -> None:
        self._http = http
        self._name = name

    async def configure(self, /, **options: Any) -> dict[str, Any]:
        """Declare it: `maxLength`, `maxBytes`, `policy`, `ttlSeconds`, `leaseSeconds`, `retryLimit`, `windowBuffer`."""
        return await self._post("configure", {"options": options})

    async def push(self, payloads: Sequence[Any], *, partition: str | None = None) -> int:
        """Push messages, all or none; how many. Raises `RequestError` (429) when the queue is full."""
        messages = [{"payload": payload} for payload in payloads]
        body = {"messages": messages} | ({"partition": partition} if partition else {})
        pushed: int = (await self._post("push", body))["pushed"]
        return pushed

    async def pop(
        self,
        *,
        group: str | None = None,
        partition: str | None = None,
        batch: int = 1,
        wait_seconds: float = 0.0,
        auto_ack: bool = False,
    ) -> list[dict[str, Any]]:
        """Messages (`id`, `partition`, `payload`, `attempts`), to be acknowledged unless `auto_ack`."""
        wait = round(wait_seconds * 1000)
        optional = {
            "group": group,
            "partition": partition,
            "wait": "true" if wait else None,
            "timeout": wait or None,
            "autoAck": "true" if auto_ack else None,
        }
        query = {"queue": self._name, "batch": batch} | {name: value for name, value in optional.items() if value}
        path = f"/api/v1/ephemeral/pop?{urlencode(query)}"
        answer = await self._http.request("GET", path, timeout_millis=wait + _WAIT_SLACK_MILLIS if wait else None)
        messages: list[dict[str, Any]] = answer["messages"]
        return messages

    async def ack(
        self, messages: Iterable[Mapping[str, Any]], status: str = "completed", *, group: str | None = None
    ) -> list[str]:
        """Acknowledge messages; what came of each: `acked`, `redelivered`, `stale` or `unknown`."""
        acks = [{"id": message["id"], "status": status} for message in messages]
        answer = await self._post("ack", {"acks": acks} | ({"group": group} if group else {}))
        return [result["outcome"] for result in answer["results"]]

    async def depth(self) -> dict[str, Any]:
        """How many messages it holds, by partition and group."""
        path = path_of("/api/v1/ephemeral/queues", self._name, "depth")
        found: dict[str, Any] = await self._http.request("GET", path)
        return found

    async def reset(self) -> int:
        """Drop all messages; how many there were."""
        dropped: int = (await self._post("reset", {}))["dropped"]
        return dropped

    async def delete(self) -> bool:
        """Delete the queue; whether there was one."""
        path = path_of("/api/v1/ephemeral/queue", self._name)
        return bool((await self._http.request("DELETE", path))["deleted"])

    async def _post(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        path = f"/api/v1/ephemeral/{what}"
        answer: dict[str, Any] = await self._http.request("POST", path, {"queue": self._name} | dict(body))
        return answer


async def fetch(http: HttpClient, queue: str, partition: str, offset: int, max_bytes: int | None) -> dict[str, Any]:
    """What a partition has from an offset on."""
    entry = {"queue": queue, "partition": partition, "offset": offset}
    entry |= {} if max_bytes is None else {"maxBytes": max_bytes}
    found: dict[str, Any] = (await http.request("POST", "/api/v1/fetch", {"entries": [entry]}))["entries"][0]
    return found


def _expiry(ttl: int | None) -> dict[str, Any]:
    return {"forever": True} if ttl is None else {"ttlSeconds": ttl}


def _expected(version: int | None) -> dict[str, Any]:
    return {} if version is None else {"expect": version}
