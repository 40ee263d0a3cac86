"""What tokens open, and what is stamped, counted and logged. Every route with every kind of token: test_matrix.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.support.ageing import until
from tests.support.api import Api


@pytest.fixture
async def guarded(start_server: StartServer) -> Api:
    return await start_server(jwt_enabled=True, jwt_secret=SECRET, jwt_audience="queen")


async def test_a_route_without_declared_names_is_closed_to_limited_tokens(guarded: Api) -> None:
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
    # Ids of partitions can be guessed: what is refused must not say which queue they are of.
    theirs_partition = theirs[0]["partitionId"]
    refused = await mine.call("POST", "/api/v1/ack", {"transactionId": "t", "partitionId": theirs_partition})
    assert refused.status == 403
    refused = await mine.call(
        "POST", "/api/v1/ack", {"transactionId": "t", "partitionId": theirs_partition, "consumerGroup": "workers"}
    )
    assert (refused.status, refused.body["detail"]) == (403, "the token is not for the queue of the partition")
    held_by_others = await everything.pop("mine.a", consumerGroup="others", batch=1)
    lease = f"/api/v1/lease/{held_by_others[0]['leaseId']}/extend"
    refused = await mine.call("POST", lease, {"seconds": 30})
    assert (refused.status, refused.body["detail"]) == (
        403,
        "the token is not for the consumer group that holds the lease",
    )
    assert (await everything.call("POST", lease, {"seconds": 30})).status == 200
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


async def test_a_name_that_cannot_be_is_no_failure_of_the_server(guarded: Api) -> None:
    mine = guarded.bearing(issue("admin", aud="queen", namespaces=["mine"]))
    for method, path, body in (
        ("GET", "/api/v1/pop/queue/mine.a%00", None),
        ("GET", "/api/v1/read/mine.a%00", None),
        ("GET", "/api/v1/kv/mine.a%00", None),
        ("GET", "/api/v1/messages?queue=mine.a%00", None),
        ("POST", "/api/v1/push", {"items": [{"queue": "mine.a\0", "payload": 1}]}),
        ("POST", "/api/v1/fetch", {"entries": [{"queue": "mine.a\0"}]}),
        ("POST", "/api/v1/configure", {"queue": "mine.a\0", "namespace": "mine"}),
    ):
        answer = await mine.call(method, path, body)
        assert answer.status < 500, (path, answer)
    await mine.close()


async def test_messages_of_others_are_not_found_by_way_of_ones_own_queue(guarded: Api) -> None:
    everything = guarded.bearing(issue("admin", aud="queen"))
    await everything.push("mine", *range(3))
    await everything.push("theirs", *range(3), ids=["a", "b", "c"])
    (message,) = await everything.pop("theirs", consumerGroup="theirs")
    foreign = {key: message[key] for key in ("partitionId", "transactionId")}
    page = (await everything.call("GET", "/api/v1/messages/search", queue="theirs", limit=1)).body
    mine = guarded.bearing(issue("admin", aud="queen", queues=["mine"]))
    for action in ("delete", "retry", "dlq"):
        answer = await mine.call("POST", f"/api/v1/messages/{action}", {"queue": "mine", "messages": [foreign]})
        assert (answer.status, answer.body["done"]) == (200, 0), action
        body = {"queue": "mine", "filter": {}, "cursor": page["cursor"], "limit": 10}
        await mine.call("POST", f"/api/v1/messages/{action}", body)
    shown = await mine.call("GET", "/api/v1/messages/search", queue="mine", cursor=page["cursor"])
    assert "theirs" not in str(shown.body)
    left = (await everything.call("GET", "/api/v1/messages", queue="theirs")).body["messages"]
    assert sorted(one["transactionId"] for one in left) == ["a", "b", "c"]
    assert (await everything.call("GET", "/api/v1/dlq", queue="theirs")).body["messages"] == []
    for caller in (everything, mine):
        await caller.close()


async def test_a_name_of_a_stream_that_others_use_cannot_be_taken_over(guarded: Api) -> None:
    everything = guarded.bearing(issue("admin", aud="queen"))
    query = {"name": "totals", "source_queue": "theirs", "config_hash": "one"}
    registered = await everything.call("POST", "/streams/v1/queries", query)
    mine = guarded.bearing(issue("read-write", aud="queen", queues=["mine"]))
    for change in ({"config_hash": "two", "reset": True}, {"config_hash": "one"}):
        answer = await mine.call("POST", "/streams/v1/queries", query | {"source_queue": "mine"} | change)
        assert answer.status == 403, change
    (kept,) = (await everything.call("GET", "/streams/v1/queries")).body
    assert (kept["query_id"], kept["source_queue"]) == (registered.body["query_id"], "theirs")
    own = await mine.call("POST", "/streams/v1/queries", query | {"source_queue": "mine", "name": "other"})
    assert own.status == 200
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
    # Whoever may only look takes nothing: items whose leases end again and again become dead letters.
    looking = guarded.bearing(issue("read-only", aud="queen"))
    assert (await looking.call("GET", "/api/v1/topics/peek", namespace="pay", topic="bills")).status == 200
    for path in ("/dequeue", "/api/v1/topics/dequeue", "/api/v1/topics/dequeue/many"):
        assert (await looking.call("GET", path, namespace="pay", topic="bills")).status == 403
    await looking.close()
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


async def test_the_producer_is_stamped_by_the_server(guarded: Api) -> None:
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
        seen += await caller.pop("q", batch=100, wait=True, timeout=60_000, autoAck=True, consumerGroup="readers")
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


async def test_the_producer_of_a_timers_message_is_its_scheduler(guarded: Api) -> None:
    alice, bob = (guarded.bearing(issue("admin", aud="queen", sub=name)) for name in ("alice", "bob"))

    def schedule(key: str) -> dict[str, Any]:
        return {"op": "schedule", "queue": "q", "timerKey": key, "payload": "MQ==", "delayMs": 600_000, "txn": key}

    assert (await alice.call("POST", "/api/v1/timers", {"operations": [schedule("a"), schedule("b")]})).status == 200
    # Whoever schedules a timer again has it say something else.
    assert (await bob.call("POST", "/api/v1/timers", {"operations": [schedule("b")]})).status == 200
    ridden = {"operations": [], "timers": [schedule("c") | {"delayMs": 0}]}
    assert (await bob.call("POST", "/api/v1/transaction", ridden)).status == 200
    for each in (schedule("a"), schedule("d")):
        assert (await alice.call("POST", "/api/v1/timers", {"operations": [each | {"delayMs": 0}]})).status == 200
    assert (await bob.call("POST", "/api/v1/timers", {"operations": [schedule("b") | {"delayMs": 0}]})).status == 200
    seen: dict[str, Any] = {}
    while len(seen) < 4:
        for message in await alice.pop("q", batch=10, wait=True, timeout=60_000, autoAck=True):
            seen[message["transactionId"]] = message["producerSub"]
    assert seen == {"a": "alice", "b": "bob", "c": "bob", "d": "alice"}

    # What its queue has no room for is a dead letter of the same producer.
    await alice.configure("q", maxSize=1)
    await alice.push("q", 1)
    assert (await bob.call("POST", "/api/v1/timers", {"operations": [schedule("e") | {"delayMs": 0}]})).status == 200

    async def letters() -> list[Any]:
        found = (await alice.call("GET", "/api/v1/dlq", queue="q")).body["messages"]
        return [letter["producerSub"] for letter in found]

    await until(letters)
    assert await letters() == ["bob"]
    for each_caller in (alice, bob):
        await each_caller.close()


async def test_the_producer_is_shown_on_every_read(guarded: Api) -> None:
    alice, bob = (guarded.bearing(issue("admin", aud="queen", sub=name)) for name in ("alice", "bob"))
    # Through the spool: while pushes are held back, they lie on disk.
    await alice.call("POST", "/api/v1/system/maintenance", {"enabled": True})
    (held,) = await bob.push("q", "held", ids=["held"])
    assert held["status"] == "buffered"
    await alice.call("POST", "/api/v1/system/maintenance", {"enabled": False})

    async def stored() -> bool:
        return bool((await alice.call("GET", "/api/v1/messages", queue="q")).body["messages"])

    await until(stored)
    (listed,) = (await alice.call("GET", "/api/v1/messages", queue="q")).body["messages"]
    path = f"/api/v1/messages/{listed['partitionId']}/held"
    shown = (await alice.call("GET", path)).body
    (of_queue,) = (await alice.call("GET", "/api/v1/status/queues/q/messages")).body
    segments = (await alice.call("GET", "/api/v1/read/q/partition/Default")).body
    assert {one["producerSub"] for one in (listed, shown, of_queue)} == {"bob"}
    assert b"bob" in segments
    (message,) = await alice.pop("q")
    await alice.ack([message], "dlq", error="no")
    (letter,) = (await alice.call("GET", "/api/v1/dlq", queue="q")).body["messages"]
    # Sent again by somebody else, one by one and all together.
    assert (await alice.call("POST", f"{path}/retry")).status == 200
    (again,) = await alice.pop("q")
    await alice.ack([again], "dlq", error="no")
    assert (await alice.call("POST", "/api/v1/dlq/retry", {"queue": "q"})).status == 200
    (redriven,) = await alice.pop("q")
    assert [one["producerSub"] for one in (message, letter, again, redriven)] == ["bob"] * 4
    for caller in (alice, bob):
        await caller.close()


async def test_only_an_administrator_pushes_in_the_name_of_others(guarded: Api) -> None:
    item = {"items": [{"queue": "q", "payload": 1}]}
    admin, bob = (guarded.bearing(issue(role, aud="queen", sub="x")) for role in ("admin", "read-write"))
    assert (await admin.call("POST", "/api/v1/push", item, producerSub="eva")).status == 201
    assert (await admin.call("POST", "/api/v1/push", item, producerSub="a\nb")).status == 400
    refused = await bob.call("POST", "/api/v1/push", item, producerSub="eva")
    assert (refused.status, "role admin" in refused.body["error"]) == (403, True)
    assert [message["producerSub"] for message in await admin.pop("q", batch=10)] == ["eva"]
    for caller in (admin, bob):
        await caller.close()


async def test_without_authentication_no_producer_is_stamped(api: Api) -> None:
    api.headers = {"Authorization": f"Bearer {issue(sub='alice')}"}
    await api.push("q", 1)
    await api.call("POST", "/api/v1/push", {"items": [{"queue": "q", "payload": 2}]}, producerSub="mallory")
    assert [message["producerSub"] for message in await api.pop("q", batch=10)] == [None, None]


async def test_refusals_are_counted_and_logged_without_the_token(
    guarded: Api, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "queen.http.auth.guard")
    token = issue("read-only", aud="queen", sub="carol")
    caller = guarded.bearing(token)
    await caller.call("DELETE", "/api/v1/resources/queues/q")
    await caller.close()
    expired = issue(exp=1)
    late = guarded.bearing(expired)
    await late.call("GET", "/api/v1/status")
    await late.close()
    assert guarded.worker is not None
    assert guarded.worker.guard.refused == {"role": 1, "expired": 1}
    counted = (await guarded.call("GET", "/metrics/prometheus")).body
    for reason in ("role", "expired"):
        assert re.search(rf'queen_auth_refused_total{{[^}}]*reason="{reason}"[^}}]*}} 1', counted), counted[:500]
    assert "DELETE /api/v1/resources/queues/q from 127.0.0.1 refused with 403" in caplog.text
    assert "Token has expired" in caplog.text
    for secret in (token, expired, token.split(".")[2], expired.split(".")[1]):
        assert secret not in caplog.text
