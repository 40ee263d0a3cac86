"""What administrators do is noted, with who and from where."""

from __future__ import annotations

import asyncpg
import pytest

from queen.http.auth.audit import is_audited
from queen.http.server.message import Access
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.ageing import until
from tests.support.api import Api


@pytest.fixture
async def guarded(start_server: StartServer) -> Api:
    return await start_server(jwt_enabled=True, jwt_secret=SECRET)


async def test_changes_are_noted_with_what_was_before(guarded: Api) -> None:
    alice = guarded.bearing(issue("admin", sub="alice"))
    await alice.configure("q", leaseTime=30)
    await alice.configure("q", leaseTime=60)
    await alice.push("q", 1)
    assert (await alice.call("DELETE", "/api/v1/resources/queues/q")).status == 200
    assert (await alice.call("DELETE", "/api/v1/dlq")).status == 400
    page = (await alice.call("GET", "/api/v1/audit")).body["entries"]
    actions = [(entry["action"], entry["object"], entry["status"]) for entry in page]
    assert actions == [
        ("DELETE /api/v1/resources/queues/{queue}", "/api/v1/resources/queues/q", 200),
        ("POST /api/v1/configure", "/api/v1/configure", 200),
        ("POST /api/v1/configure", "/api/v1/configure", 200),
    ]
    assert {(entry["actor"], entry["address"]) for entry in page} == {("alice", "127.0.0.1")}
    changed, made = page[1], page[2]
    assert made["before"] is None
    assert made["after"]["options"] == {"leaseTime": 30}
    assert changed["before"]["lease_time"] == 30
    assert changed["after"]["options"] == {"leaseTime": 60}
    filtered = (await alice.call("GET", "/api/v1/audit", action="POST", limit=1, before=page[1]["id"])).body
    assert [entry["id"] for entry in filtered["entries"]] == [made["id"]]
    bob = guarded.bearing(issue("read-write", sub="bob"))
    assert (await bob.call("GET", "/api/v1/audit")).status == 403
    for caller in (alice, bob):
        await caller.close()


async def test_every_administrative_route_that_changes_something_is_audited(guarded: Api) -> None:
    assert guarded.worker is not None
    for route in guarded.worker.http.router.routes:
        if route.access is Access.ADMIN and route.method != "GET" and "/internal/" not in route.pattern:
            assert is_audited(route), route


# The work of clients: who pushed a message is stamped on it, and the rest is counted.
NOT_AUDITED = {
    "POST /api/v1/push",
    "POST /api/v1/ack",
    "POST /api/v1/ack/batch",
    "POST /api/v1/transaction",
    "POST /api/v1/lease/{lease}/extend",
    "POST /api/v1/traces",
    "POST /streams/v1/queries",
    "POST /streams/v1/cycle",
    "POST /api/v1/stages",
    "POST /api/v1/stages/publish",
    "POST /api/v1/stages/abandon",
    "POST /api/v1/kv",
    "POST /api/v1/locks",
    "POST /api/v1/timers",
    "DELETE /api/v1/timers/{queue}/{timer}",
    "POST /api/v1/ephemeral/push",
    "POST /api/v1/ephemeral/ack",
    "POST /enqueue",
    "POST /ack",
    "POST /nack",
    "POST /api/v1/topics/enqueue",
    "POST /api/v1/topics/ack",
    "POST /api/v1/topics/nack",
    "POST /api/v1/topics/extend",
    "POST /api/v1/topics/release",
}


async def test_of_what_changes_something_only_the_work_of_clients_is_not_audited(guarded: Api) -> None:
    assert guarded.worker is not None
    changing = [
        route
        for route in guarded.worker.http.router.routes
        if route.method != "GET" and route.access >= Access.READ_WRITE and "/internal/" not in route.pattern
    ]
    assert {f"{route.method} {route.pattern}" for route in changing if not is_audited(route)} == NOT_AUDITED


async def test_old_entries_are_removed(
    start_server: StartServer, connection: asyncpg.Connection[asyncpg.Record]
) -> None:
    await connection.execute(
        "INSERT INTO queen.audit (at, action) VALUES (now() - interval '8 days', 'old'), (now(), 'new')"
    )
    await start_server(audit_retention_days=7, retention_interval=1000)

    async def removed() -> bool:
        return bool(await connection.fetchval("SELECT array_agg(action) = '{new}' FROM queen.audit"))

    await until(removed)
