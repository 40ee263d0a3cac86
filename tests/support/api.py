"""The HTTP API as tests call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from queen.server.worker import Worker
from queen.wire.segment import MEDIA_TYPE
from tests.support.conformance import check_conformance


@dataclass(frozen=True)
class Answer:
    """Status, decoded body (None when empty) and headers of one answer."""

    status: int
    body: Any
    headers: dict[str, str]


class Api:
    """Calls to one server. The short names do the common thing and check that it worked."""

    def __init__(self, url: str, worker: Worker | None = None) -> None:
        self.url = url
        self.worker = worker
        self.headers: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, json: Any = None, data: bytes | None = None, **query: Any) -> Answer:
        """Any request; `query` values are sent as text."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        params = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in query.items()}
        async with self._session.request(
            method, self.url + path, json=json, data=data, params=params, headers=self.headers
        ) as answer:
            body: Any = None
            if answer.content_length:
                kind = answer.content_type
                body = await answer.text() if kind.startswith("text/") else await answer.read()
                if not kind.startswith("text/") and kind != MEDIA_TYPE:
                    body = await answer.json(content_type=None)
            if self.worker is not None:
                check_conformance(
                    self.worker.http.router, method, answer.url.raw_path_qs, answer.status, await answer.read()
                )
            return Answer(answer.status, body, dict(answer.headers))

    def bearing(self, token: str | None) -> Api:
        """Calls to the same server with a token; to be closed like this one."""
        other = Api(self.url, self.worker)
        other.headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        return other

    async def push(self, queue: str, *payloads: Any, partition: str = "Default", ids: list[str] | None = None) -> Any:
        """Push payloads to one partition; returns the results."""
        items: list[dict[str, Any]] = [
            {"queue": queue, "partition": partition, "payload": payload} for payload in payloads
        ]
        for item, transaction_id in zip(items, ids or [], strict=False):
            item["transactionId"] = transaction_id
        answer = await self.call("POST", "/api/v1/push", {"items": items})
        assert answer.status == 201, answer
        return answer.body

    async def pop(self, queue: str, partition: str | None = None, **query: Any) -> list[dict[str, Any]]:
        """Pop; returns the messages."""
        path = f"/api/v1/pop/queue/{queue}" + (f"/partition/{partition}" if partition else "")
        answer = await self.call("GET", path, **query)
        assert answer.status in (200, 204), answer
        return answer.body["messages"] if answer.body else []

    async def ack(
        self,
        messages: list[dict[str, Any]],
        status: str | list[str] = "completed",
        group: str | None = None,
        error: str | None = None,
        lease: bool = True,
    ) -> Any:
        """Ack messages in one batch; `status` for all, or one each; returns the results."""
        statuses = [status] * len(messages) if isinstance(status, str) else status
        body: dict[str, Any] = {
            "acknowledgments": [
                {
                    "transactionId": message["transactionId"],
                    "partitionId": message["partitionId"],
                    "status": one,
                    "error": error,
                    **({"leaseId": message["leaseId"]} if lease else {}),
                }
                for message, one in zip(messages, statuses, strict=True)
            ],
            "consumerGroup": group,
        }
        answer = await self.call("POST", "/api/v1/ack/batch", body)
        assert answer.status == 200, answer
        return answer.body

    async def configure(self, queue: str, namespace: str | None = None, task: str | None = None, **options: Any) -> Any:
        """Create or configure a queue; options in camelCase."""
        body = {"queue": queue, "namespace": namespace, "task": task, "options": options}
        answer = await self.call("POST", "/api/v1/configure", body)
        assert answer.status == 200, answer
        return answer.body

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def payloads(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The payloads of messages, in order."""
    return [message["data"] for message in messages]
