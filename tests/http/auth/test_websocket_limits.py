"""What the token of a WebSocket permits, frame by frame."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.api import Api


@pytest.fixture
async def guarded(start_server: StartServer) -> Api:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET)
    admin = api.bearing(issue())
    for queue in ("mine.a", "theirs.a"):
        await admin.push(queue, 1, 2)
    await admin.close()
    return api


@asynccontextmanager
async def connected(api: Api, token: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.ws_connect(f"{api.url}/ws/v1/consume", protocols=["queen.v1"]) as socket,
    ):
        yield socket


async def said(socket: aiohttp.ClientWebSocketResponse, **request: Any) -> dict[str, Any]:
    """The first answer to a request."""
    await socket.send_json(request)
    answer: dict[str, Any] = await socket.receive_json(timeout=100)
    return answer


@pytest.mark.parametrize(("role", "status"), [("read-only", 403), (None, 403), ("read-write", 101), ("admin", 101)])
async def test_a_connection_needs_the_role(guarded: Api, role: str | None, status: int) -> None:
    try:
        async with connected(guarded, issue(role)):
            opened = 101
    except aiohttp.WSServerHandshakeError as error:
        opened = error.status
    assert opened == status


@pytest.mark.parametrize("limits", [{"queues": ["mine.*"]}, {"namespaces": ["mine"]}])
async def test_only_queues_of_the_token_can_be_subscribed_to(
    guarded: Api, limits: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(guarded, issue("read-write", **limits)) as socket:
        for queue in ("theirs.a", "theirs.new", "plain"):
            refused = await said(socket, type="subscribe", id="s", queue=queue)
            assert (refused["type"], refused["status"]) == ("error", 403), refused
        assert guarded.worker is not None
        assert guarded.worker.guard.refused == {"resource": 3}
        assert "GET /ws/v1/consume from 127.0.0.1 refused with 403: the token is not for the " in caplog.text
        assert (await said(socket, type="subscribe", id="s", queue="mine.a"))["type"] == "subscribed"
        batch = await socket.receive_json(timeout=100)
        assert [message["data"] for message in batch["messages"]] == [1]
    admin = guarded.bearing(issue())
    assert (await admin.call("GET", "/api/v1/resources/queues/theirs.new")).status == 404, "it was not even made"
    await admin.close()


async def test_only_groups_of_the_token_consume(guarded: Api) -> None:
    async with connected(guarded, issue("read-write", groups=["mine*"])) as socket:
        for group in ("theirs", None):
            request = {"type": "subscribe", "id": "s", "queue": "mine.a"} | ({"consumerGroup": group} if group else {})
            assert (await said(socket, **request))["status"] == 403
        subscribed = await said(socket, type="subscribe", id="s", queue="mine.a", consumerGroup="mine1")
        assert subscribed["type"] == "subscribed"


async def test_what_others_hold_cannot_be_settled(guarded: Api) -> None:
    admin = guarded.bearing(issue())
    (held,) = await admin.pop("theirs.a", consumerGroup="workers")
    ack = {key: held[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "completed"}
    async with connected(guarded, issue("read-write", queues=["mine.*"])) as socket:
        assert (await said(socket, type="subscribe", id="s", queue="mine.a", consumerGroup="w"))["type"] == "subscribed"
        mine = (await socket.receive_json(timeout=100))["messages"][0]
        forged = ack | {"leaseId": mine["leaseId"]}
        for request in (
            {"type": "ack", "id": 1, "acknowledgments": [ack], "consumerGroup": "workers"},
            {"type": "ack", "id": 2, "acknowledgments": [{**ack, "leaseId": None}], "consumerGroup": "workers"},
            {"type": "nack", "id": 3, "acknowledgments": [ack], "consumerGroup": "workers"},
            {"type": "renew", "id": 4, "leaseId": held["leaseId"], "seconds": 600},
            {"type": "ack", "id": 5, "acknowledgments": [forged], "consumerGroup": "workers"},
        ):
            answer = await said(socket, **request)
            assert (answer["type"], answer["status"]) == ("error", 403), (request, answer)
            assert "theirs" not in str(answer), "ids of partitions can be guessed"
    # Still held by whoever held it: nothing was settled, and it can be.
    (settled,) = await admin.ack([held], group="workers")
    assert settled["success"]
    await admin.close()


async def test_a_connection_ends_with_its_token(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, jwt_clock_skew=0)
    token = issue("read-write", exp=int(time.time()) + 8)
    async with connected(api, token) as socket:
        closed = await socket.receive(timeout=100)
        assert closed.type is aiohttp.WSMsgType.CLOSE
        assert (closed.data, closed.extra) == (1008, "the token has expired: connect again with another")
