"""The permission matrix, made from the route table: every route with every kind of token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import asyncpg
import pytest

from queen.http.auth.resources import READERS
from queen.http.server.message import Access, Route
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.api import Answer, Api

ROLES = {
    "admin": Access.ADMIN,
    "read-write": Access.READ_WRITE,
    "read-only": Access.READ_ONLY,
    "none": Access.PUBLIC,
}
REFUSED = {
    "no token": None,
    "expired": issue(exp=1),
    "wrong signature": issue(secret="another secret, also of thirty-two bytes"),
    "wrong audience": issue(aud="somebody else"),
    "no signature": issue(aud="queen").rpartition(".")[0] + ".",
}
PUBLIC = {
    "GET /health",
    "GET /livez",
    "GET /readyz",
    "GET /metrics",
    "GET /metrics/prometheus",
    "GET /openapi.json",
    "GET /docs",
}


@pytest.fixture
async def guarded(start_server: StartServer) -> Api:
    return await start_server(jwt_enabled=True, jwt_secret=SECRET, jwt_audience="queen")


def routes_of(api: Api) -> list[Route]:
    assert api.worker is not None
    return api.worker.shell.router.routes


async def ask(
    api: Api, route: Route, token: str | None, names: Mapping[str, str] | None = None, **query: str
) -> Answer:
    """Any request to a route; the names in its path exist nowhere, unless they are given."""
    path = route.pattern
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", (names or {}).get(name, f"no-such-{name}"))
    headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
    body: Any = {} if route.method in ("POST", "PUT") else None
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(route.method, api.url + path, json=body, params=query) as answer,
    ):
        decoded = await answer.json() if answer.content_type == "application/json" else None
        return Answer(answer.status, decoded, dict(answer.headers))


async def tables(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, int]:
    """How many rows every table of queues and topics has."""
    names = await connection.fetch(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'queen' AND tablename !~ 'metrics|rollup|sample|schema'"
    )
    return {
        name["tablename"]: await connection.fetchval(f'SELECT count(*) FROM queen."{name["tablename"]}"')
        for name in names
    }


async def test_only_these_routes_are_public(guarded: Api) -> None:
    assert {
        f"{route.method} {route.pattern}" for route in routes_of(guarded) if route.access is Access.PUBLIC
    } == PUBLIC


@pytest.mark.parametrize("kind", REFUSED)
async def test_every_route_refuses_who_has_no_good_token(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record], kind: str
) -> None:
    before = await tables(connection)
    for route in routes_of(guarded):
        answer = await ask(guarded, route, REFUSED[kind])
        if route.access is Access.PUBLIC:
            assert answer.status not in (401, 403), route
            continue
        assert answer.status == 401, route
        assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="queen"'), route
        expected = {
            "no token": "Authentication required",
            "expired": "Token has expired",
            "wrong audience": "Invalid token audience",
        }
        assert answer.body["error"] == expected.get(kind, "Invalid token signature"), route
    assert await tables(connection) == before


@pytest.mark.parametrize("role", ROLES)
async def test_every_route_admits_the_roles_of_its_level_and_no_other(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record], role: str
) -> None:
    before = await tables(connection)
    token = issue(role if role != "none" else None, aud="queen")
    for route in routes_of(guarded):
        if ROLES[role] >= route.access:
            continue
        answer = await ask(guarded, route, token)
        assert (answer.status, answer.body["error"]) == (403, "Insufficient permissions"), route
    assert await tables(connection) == before, "a request that was refused has changed something"
    for route in routes_of(guarded):
        if ROLES[role] >= route.access:
            answer = await ask(guarded, route, token)
            assert answer.status not in (401, 403), (route, answer)


@pytest.mark.parametrize("claim", ["queues", "namespaces"])
async def test_every_route_refuses_what_is_not_of_the_token(
    guarded: Api, connection: asyncpg.Connection[asyncpg.Record], claim: str
) -> None:
    """Whatever a route is about, a token for other queues or namespaces gets nothing from it, whatever its role."""
    theirs = guarded.bearing(issue("admin", aud="queen"))
    await theirs.push("theirs", 1)
    (message,) = await theirs.pop("theirs", consumerGroup="theirs")
    await theirs.close()
    names = {
        "queue": "theirs",
        "group": "theirs",
        "partition": message["partitionId"],
        "transaction": message["transactionId"],
        "lease": message["leaseId"],
    }
    before = await tables(connection)
    limits: dict[str, Any] = {claim: ["mine*"]}
    token = issue("admin", aud="queen", **limits)
    for route in routes_of(guarded):
        if route.access is Access.PUBLIC:
            continue
        named = names | {"partition": "Default"} if "{queue}" in route.pattern else names
        answer = await ask(
            guarded, route, token, named, queue="theirs", namespace="theirs", topic="theirs", ns="theirs"
        )
        # 400: the body names nothing, and the handler would say the same. 426: subscriptions are looked at one by one.
        # An acknowledgment of nothing concerns nobody.
        assert answer.status in (400, 403, 426), (route, answer)
        assert answer.status == 403 or f"{route.method} {route.pattern}" in READERS, (route, answer)
    assert await tables(connection) == before


async def test_a_route_that_nobody_described_is_closed_to_limited_tokens(guarded: Api) -> None:
    for path in (
        "/api/v1/status",
        "/api/v1/resources/overview",
        "/api/v1/system/maintenance",
        "/api/v1/consumer-groups",
    ):
        caller = guarded.bearing(issue("admin", aud="queen", queues=["a"]))
        answer = await caller.call("GET", path, queue="a")
        await caller.close()
        assert answer.status == 403, path


async def test_patterns_limit_what_is_pushed_popped_and_acked(guarded: Api) -> None:
    everything = guarded.bearing(issue("admin", aud="queen"))
    mine = guarded.bearing(issue("read-write", aud="queen", queues=["mine.*"], groups=["workers*"]))
    await everything.push("theirs", 1)
    await mine.push("mine.a", 1, 2)
    refused = await mine.call(
        "POST", "/api/v1/push", {"items": [{"queue": "mine.a", "payload": 1}, {"queue": "theirs", "payload": 1}]}
    )
    assert refused.status == 403
    assert refused.body == {"error": "Insufficient permissions", "detail": "the token is not for the queue 'theirs'"}
    assert (await mine.call("GET", "/api/v1/pop/queue/theirs", consumerGroup="workers")).status == 403
    assert (await mine.call("GET", "/api/v1/pop/queue/mine.a", consumerGroup="others")).status == 403
    assert (await mine.call("GET", "/api/v1/pop/queue/mine.a")).status == 403, "the mode without a group is one too"
    assert (await mine.call("GET", "/api/v1/pop", namespace="mine", consumerGroup="workers")).status == 403
    taken = await mine.pop("mine.a", consumerGroup="workers", batch=2)
    assert [message["data"] for message in taken] == [1, 2]
    theirs = await everything.pop("theirs", consumerGroup="workers")
    for message in (theirs[0], taken[0]):
        ack = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "completed"}
        answer = await mine.call("POST", "/api/v1/ack", ack | {"consumerGroup": "others"})
        assert answer.status == 403
        answer = await mine.call("POST", "/api/v1/ack/batch", {"acknowledgments": [ack], "consumerGroup": "workers"})
        assert answer.status == (200 if message is taken[0] else 403)
        answer = await mine.call("POST", f"/api/v1/lease/{message['leaseId']}/extend", {"seconds": 30})
        assert answer.status == (200 if message is taken[0] else 403)
    for caller in (everything, mine):
        await caller.close()


async def test_a_transaction_with_one_operation_too_many_does_nothing(guarded: Api) -> None:
    mine = guarded.bearing(issue("read-write", aud="queen", queues=["mine"], scopes=["mine:write"]))
    push = {"type": "push", "items": [{"queue": "mine", "payload": 1}]}
    for other in (
        {"type": "push", "items": [{"queue": "theirs", "payload": 1}]},
        {"type": "enqueue", "items": [{"namespace": "theirs", "topic": "mine", "payload": "aGk="}]},
        {"type": "enqueue", "items": [{"namespace": "mine", "topic": "theirs", "payload": "aGk="}]},
    ):
        answer = await mine.call("POST", "/api/v1/transaction", {"operations": [push, other]})
        assert answer.status == 403, other
    assert (await mine.call("POST", "/api/v1/transaction", {"operations": [push]})).status == 200
    assert len(await mine.pop("mine", batch=10)) == 1
    await mine.close()


async def test_namespaces_limit_queues_by_what_they_are_configured_as(guarded: Api) -> None:
    everything = guarded.bearing(issue("admin", aud="queen"))
    await everything.configure("shared", namespace="tenant")
    await everything.configure("tenant.looks", namespace="other")
    mine = guarded.bearing(issue("read-write", aud="queen", namespaces=["tenant"]))
    await mine.push("shared", 1)
    await mine.push("tenant.new", 1)
    for queue in ("tenant.looks", "other.new", "plain"):
        answer = await mine.call("POST", "/api/v1/push", {"items": [{"queue": queue, "payload": 1}]})
        assert answer.status == 403, queue
    # Nor can it take a queue over, or move its own elsewhere.
    for queue, namespace in (("tenant.looks", "tenant"), ("shared", "other"), ("shared", "")):
        answer = await mine.call("POST", "/api/v1/configure", {"queue": queue, "namespace": namespace})
        assert answer.status == 403, (queue, namespace)
    assert len(await mine.pop("shared")) == 1
    assert (await mine.call("GET", "/api/v1/pop", namespace="other")).status == 403
    assert (await mine.call("GET", "/api/v1/pop", namespace="tenant")).status == 200
    for caller in (everything, mine):
        await caller.close()


async def test_scopes_open_topics_and_nothing_else(guarded: Api) -> None:
    both = guarded.bearing(issue(None, aud="queen", scopes=["pay:write", "pay:read"]))
    reader = guarded.bearing(issue(None, aud="queen", scopes=["pay:read"]))
    item = {"namespace": "pay", "topic": "bills", "payload": "aGk="}
    assert (await both.call("POST", "/enqueue", [item])).status == 200
    assert (await both.call("POST", "/enqueue", [item, item | {"namespace": "mail"}])).status == 403
    assert (await reader.call("POST", "/enqueue", [item])).status == 403
    taken = await reader.call("GET", "/dequeue", namespace="pay", topic="bills")
    assert len(taken.body) == 1
    ref = {"id": taken.body[0]["id"], "namespace": "pay", "topic": "bills"}
    assert (await reader.call("POST", "/ack", ref)).status == 403
    assert (await both.call("POST", "/ack", ref)).status == 200
    assert (await both.call("GET", "/api/v1/topics/dequeue", namespace="mail", topic="bills")).status == 403
    assert (await both.call("POST", "/api/v1/topics/purge", {"namespace": "pay", "topic": "bills"})).status == 403
    assert (await both.call("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 1}]})).status == 403
    for caller in (both, reader):
        await caller.close()


async def test_the_word_bearer_may_be_left_out(guarded: Api) -> None:
    token = issue("read-only", aud="queen")
    for header in (token, f"Bearer {token}", f"bearer {token}", f"BEARER   {token}"):
        guarded.headers = {"Authorization": header}
        assert (await guarded.call("GET", "/api/v1/status")).status == 200
    guarded.headers = {"Authorization": "Basic dXNlcjpwYXNz"}
    assert (await guarded.call("GET", "/api/v1/status")).status == 401
    guarded.headers = {}
    assert (await guarded.call("GET", "/api/v1/status", token=token)).status == 401, "only WebSockets have it there"


async def test_paths_can_be_exempted(start_server: StartServer) -> None:
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, jwt_skip_paths="/api/v1/status,/api/v1/resources/")
    assert (await api.call("GET", "/api/v1/status")).status == 200
    assert (await api.call("GET", "/api/v1/resources/queues")).status == 200
    assert (await api.call("GET", "/api/v1/status/queues")).status == 401
    assert (await api.call("POST", "/api/v1/push", {"items": []})).status == 401


async def test_who_pushed_is_stamped_by_the_server(guarded: Api) -> None:
    caller = guarded.bearing(issue("admin", aud="queen", sub="alice"))
    claim = {"queue": "q", "payload": 1, "transactionId": "one", "producerSub": "mallory"}
    assert (await caller.call("POST", "/api/v1/push", {"items": [claim]})).status == 201
    other = guarded.bearing(issue("admin", aud="queen", sub="bob"))
    await other.push("q", *range(60))
    operation = {"type": "push", "items": [{"queue": "q", "payload": 2, "producerSub": "mallory"}]}
    assert (await other.call("POST", "/api/v1/transaction", {"operations": [operation]})).status == 200
    held = {"items": [{"queue": "q", "payload": 3}], "bufferMs": 1, "bufferMax": 1}
    assert (await caller.call("POST", "/api/v1/push", held)).status == 201
    seen: list[Any] = []
    while len(seen) < 63:
        seen += await caller.pop("q", batch=100, wait=True, timeout=5000, autoAck=True, consumerGroup="readers")
    assert sorted(message["producerSub"] for message in seen) == ["alice"] * 2 + ["bob"] * 61
    (first,) = await caller.pop("q", batch=1)
    assert (first["transactionId"], first["producerSub"]) == ("one", "alice")
    await caller.ack([first], "dlq", error="no")
    letters = (await caller.call("GET", "/api/v1/dlq", queue="q")).body["messages"]
    assert [letter["producerSub"] for letter in letters] == ["alice"]
    # Whoever sends it again is not who wrote it.
    assert (await other.call("POST", "/api/v1/dlq/retry", {"queue": "q"})).status == 200
    listed = (await caller.call("GET", "/api/v1/messages", queue="q", limit=100)).body["messages"]
    assert {message["producerSub"] for message in listed if message["transactionId"].startswith("one")} == {"alice"}
    for each in (caller, other):
        await each.close()


async def test_without_authentication_nobody_is_stamped(api: Api) -> None:
    api.headers = {"Authorization": f"Bearer {issue(sub='alice')}"}
    await api.push("q", 1)
    assert [message["producerSub"] for message in await api.pop("q")] == [None]


async def test_refusals_are_counted_and_logged_without_the_token(
    guarded: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "queen.http.auth.guard")
    token = issue("read-only", aud="queen", sub="carol")
    caller = guarded.bearing(token)
    await caller.call("DELETE", "/api/v1/resources/queues/q")
    await caller.close()
    expired = issue(exp=1)
    status = next(route for route in routes_of(guarded) if route.pattern == "/api/v1/status")
    await ask(guarded, status, expired)
    assert guarded.worker is not None
    assert guarded.worker.guard.refused == {"role": 1, "expired": 1}
    assert "DELETE /api/v1/resources/queues/q from 127.0.0.1 refused with 403" in caplog.text
    assert "Token has expired" in caplog.text
    for secret in (token, expired, token.split(".")[2], expired.split(".")[1]):
        assert secret not in caplog.text
