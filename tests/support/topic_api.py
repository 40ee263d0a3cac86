"""The routes of topics as tests call them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from tests.support.api import Answer, Api

NAMESPACE, TOPIC = "ns", "t"


def item(payload: Any, topic: str = TOPIC, namespace: str = NAMESPACE, **fields: Any) -> dict[str, Any]:
    """An item to enqueue, its payload any JSON value."""
    return {"namespace": namespace, "topic": topic, "data": payload} | fields


def named(leased: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """What names an item that was dequeued."""
    return {key: leased[key] for key in ("id", "namespace", "topic")} | fields


def b64(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def values(items: list[dict[str, Any]]) -> list[Any]:
    return [one["data"] for one in items]


class TopicApi:
    """Calls to one server; the short names check that it worked."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def call(self, method: str, path: str, json: Any = None, **query: Any) -> Answer:
        return await self.api.call(method, f"/api/v1/topics{path}", json, **query)

    async def short(self, path: str, ref: dict[str, Any]) -> int:
        """The status with which a short path answers for one item."""
        return (await self.api.call("POST", path, ref)).status

    async def good(self, method: str, path: str, json: Any = None, **query: Any) -> Any:
        answer = await self.call(method, path, json, **query)
        assert answer.status == 200, answer
        return answer.body

    async def enqueue(self, *items: dict[str, Any]) -> list[int]:
        ids: list[int] = await self.good("POST", "/enqueue", list(items))
        return ids

    async def dequeue(
        self, limit: int = 10, topic: str = TOPIC, namespace: str = NAMESPACE, **query: Any
    ) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = await self.good(
            "GET", "/dequeue", namespace=namespace, topic=topic, limit=limit, **query
        )
        return items

    async def ack(self, *items: dict[str, Any]) -> list[bool]:
        return [one["success"] for one in await self.good("POST", "/ack", [named(one) for one in items])]

    async def nack(self, *items: dict[str, Any], error: str = "failed") -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = await self.good("POST", "/nack", [named(one, error=error) for one in items])
        return results

    async def dead(self, topic: str = TOPIC, namespace: str = NAMESPACE, **query: Any) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = await self.good("GET", "/dlq", namespace=namespace, topic=topic, **query)
        return items

    async def configure(self, topic: str = TOPIC, namespace: str = NAMESPACE, **options: Any) -> dict[str, Any]:
        body = {"namespace": namespace, "topic": topic, "options": options}
        configured: dict[str, Any] = await self.good("POST", "/configure", body)
        return configured

    async def counts(self, topic: str = TOPIC, namespace: str = NAMESPACE) -> dict[str, int]:
        (found,) = await self.good("GET", "/counts", namespace=namespace, topic=topic)
        return {state: found[state] for state in ("ready", "delayed", "leased", "dead")}

    async def until_ready(self, count: int) -> None:
        """Until so many items are ready: leases lapse when PostgreSQL's clock says so."""
        async with asyncio.timeout(100):
            while True:
                if (await self.counts())["ready"] == count:
                    return
                await asyncio.sleep(0.02)
