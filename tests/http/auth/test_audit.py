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
from tests.support.proxy import Proxy

NO_RETRIES = {"max_retries": 0}


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


async def test_what_was_before_is_that_of_the_thing_which_changes(guarded: Api) -> None:
    alice = guarded.bearing(issue("admin", sub="alice"))
    await alice.push("q", 1)

    async def before(method: str, path: str, body: object = None) -> object:
        answer = await alice.call(method, path, body)
        assert answer.status == 200, answer
        return (await alice.call("GET", "/api/v1/audit", limit=1)).body["entries"][0]["before"]

    def declaration(database: str) -> dict[str, object]:
        sections = {"sources": {"s": {"queue": "q"}}, "sinks": {"t": {"from": "s", "jdbc": database, "password": "p"}}}
        return {"name": "leads", "declaration": sections}

    path = "/api/v1/pipeline-declarations"
    assert await before("PUT", path, declaration("postgresql://me:secret@old/db")) is None
    changed = await before("PUT", path, declaration("postgresql://me:secret@new/db"))
    assert "postgresql://me:***@old/db" in str(changed)
    assert "postgresql://me:***@new/db" in str(await before("DELETE", f"{path}/leads"))
    entries = (await alice.call("GET", "/api/v1/audit")).body["entries"]
    assert "secret" not in str(entries)
    assert "'password': '***'" in str(entries)

    await alice.call("GET", "/api/v1/pop/queue/q", consumerGroup="g")
    pause = "/api/v1/consumer-groups/g/queues/q"
    assert await before("POST", f"{pause}/pause") == {"paused": False}
    assert await before("POST", f"{pause}/resume") == {"paused": True}
    # However the path is spelled.
    assert await before("POST", f"{pause}/pause/") == {"paused": False}

    own = {"queue": "presence", "options": {"maxLength": 5}}
    assert await before("POST", "/api/v1/ephemeral/configure", own) is None
    known = await before("DELETE", "/api/v1/ephemeral/queue/presence")
    assert isinstance(known, dict)
    assert (known["options"]["maxLength"], known["length"]) == (5, 0)

    query = {"name": "totals", "source_queue": "q", "sink_queue": "r", "config_hash": "h"}
    assert (await alice.call("POST", "/streams/v1/queries", query)).status == 200
    gone = await before("DELETE", "/streams/v1/queries/totals")
    assert gone == {"name": "totals", "source_queue": "q", "sink_queue": "r"}
    await alice.close()


async def test_what_was_before_a_subscription_is_moved_and_a_dead_item_sent_again(guarded: Api) -> None:
    alice = guarded.bearing(issue("admin", sub="alice"))
    await alice.push("q", 1)
    await alice.call("GET", "/api/v1/pop/queue/q", consumerGroup="g", subscriptionMode="new")
    moved = {"subscriptionTimestamp": "2026-01-01T00:00:00Z"}
    for expected in (None, "2026-01-01T00:00:00Z"):
        assert (await alice.call("POST", "/api/v1/consumer-groups/g/subscription", moved)).status == 200
        (entry,) = (await alice.call("GET", "/api/v1/audit", limit=1)).body["entries"]
        (one,) = entry["before"]["subscriptions"]
        assert (one["queue"], one["mode"]) == ("q", "new")
        assert expected is None or one["since"] == expected

    for path in ("/dlq/retry", "/api/v1/topics/dlq/retry"):
        await alice.call("POST", "/api/v1/topics/configure", {"namespace": "n", "topic": path, "options": NO_RETRIES})
        await alice.call("POST", "/enqueue", [{"namespace": "n", "topic": path, "data": 1}])
        (item,) = (await alice.call("GET", "/dequeue", namespace="n", topic=path)).body
        ref = {key: item[key] for key in ("id", "namespace", "topic", "lease_owner")}
        assert (await alice.call("POST", "/nack", ref)).status == 200
        assert (await alice.call("POST", path, [ref])).status == 200
        (entry,) = (await alice.call("GET", "/api/v1/audit", limit=1)).body["entries"]
        assert (entry["action"], entry["before"]["dead"]) == (f"POST {path}", 1)
    await alice.close()


async def test_a_long_request_is_noted_in_short(guarded: Api) -> None:
    """Neither blanks nor brackets hide what was changed, or have the log unreadable."""
    alice = guarded.bearing(issue("admin", sub="alice"))

    async def noted(method: str, path: str, body: bytes) -> object:
        answer = await alice.call(method, path, data=body)
        assert answer.status == 200, answer
        return (await alice.call("GET", "/api/v1/audit", limit=1)).body["entries"][0]["after"]

    padded = b'{"queue": "q", "options": {"leaseTime": 5}' + b" " * 10_000 + b"}"
    assert await noted("POST", "/api/v1/configure", padded) == {"queue": "q", "options": {"leaseTime": 5}}
    entry = b'{"partitionId": "51756565-0000-8000-8000-000000000001", "transactionId": "%b"}' % (b"x" * 200)
    many = await noted("POST", "/api/v1/messages/delete", b'{"queue": "q", "messages": [%b]}' % b",".join([entry] * 50))
    assert isinstance(many, dict)
    assert (many["queue"], len(many["messages"]), many["messages"][-1]) == ("q", 21, "... (50 entries)")
    text = str(await noted("DELETE", "/api/v1/resources/queues/q", b"[" * 5_000 + b"]" * 5_000))
    assert text.count("[") < 100
    assert await noted("DELETE", "/api/v1/resources/queues/q", b'{"password": "p", "x": "' + b"y" * 9_000 + b'"}') == {
        "password": "***",
        "x": "y" * 200 + "... (9000 characters)",
    }
    await alice.close()


async def test_what_only_counts_is_not_noted(guarded: Api) -> None:
    alice = guarded.bearing(issue("admin", sub="alice"))
    await alice.push("q", 1)
    for verb in ("retry", "dlq", "delete"):
        path = f"/api/v1/messages/{verb}"
        counted = await alice.call("POST", path, {"queue": "q", "filter": {}, "dryRun": True})
        assert counted.body["matched"] == 1
        assert (await alice.call("GET", "/api/v1/audit")).body["entries"] == []
    sent = {"queue": "q", "filter": {}, "dryRun": False}
    assert (await alice.call("POST", "/api/v1/messages/delete", sent)).body["done"] == 1
    (noted,) = (await alice.call("GET", "/api/v1/audit")).body["entries"]
    assert noted["action"] == "POST /api/v1/messages/delete"
    await alice.close()


async def test_every_administrative_route_that_changes_something_is_audited(guarded: Api) -> None:
    assert guarded.worker is not None
    for route in guarded.worker.http.router.routes:
        if route.access is Access.ADMIN and route.method != "GET" and "/internal/" not in route.pattern:
            assert is_audited(route), route


@pytest.mark.parametrize(
    ("proxies", "address"), [(0, "127.0.0.1"), (1, "10.0.0.7"), (2, "192.0.2.1"), (4, "127.0.0.1")]
)
async def test_the_address_is_that_of_the_client_as_far_as_proxies_are_trusted(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, proxies: int, address: str
) -> None:
    """Further to the left stands what the client itself may have written."""
    api = await start_server(jwt_enabled=True, jwt_secret=SECRET, trusted_proxies=proxies)
    alice = api.bearing(issue("admin", sub="alice"))
    alice.headers |= {"X-Forwarded-For": "203.0.113.9, 192.0.2.1, 10.0.0.7"}
    await alice.configure("q", leaseTime=30)
    (entry,) = (await alice.call("GET", "/api/v1/audit")).body["entries"]
    assert entry["address"] == address
    alice.headers["Authorization"] = "Bearer a.b.c"
    with caplog.at_level("INFO", "queen.http.auth.guard"):
        assert (await alice.call("POST", "/api/v1/push", {"items": []})).status == 401
    assert f"POST /api/v1/push from {address} refused" in caplog.text
    await alice.close()


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


async def test_what_could_not_be_noted_is_in_the_log_of_the_server(
    start_server: StartServer, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    api = await start_server(database_urls=(proxy.dsn,))
    async with proxy.away():
        assert (await api.call("DELETE", "/api/v1/resources/queues/q")).status == 503
    missing = (
        "/api/v1/resources/queues/q by a client without a token from 127.0.0.1 was answered 503, but is missing in"
    )
    assert missing in caplog.text
