"""Data that version 0.1 wrote: a server of today opens it, finds all of it, and goes on with it.

The archive and `expected.json` are frozen, see write_data.py. Everything is asked over HTTP: the test knows nothing of
the server's insides, nor of its tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.compat.served import Http, serving
from tests.support.ageing import block_until

_HERE = Path(__file__).parent
_DEFAULT = "Default"

Found = dict[str, Any]


@dataclass(frozen=True)
class Old:
    """A server on the old data, after what waited in the spool was let in."""

    http: Http
    maintenance: Found
    """What it said of maintenance before that."""

    def log(self, queue: str, partition: str, group: str) -> list[Found]:
        """Everything in a partition, read by a group of its own."""
        return self.http.pop(queue, partition, batch=1000, autoAck="true", consumerGroup=group)

    def topic(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        return self.http.good(method, f"/api/v1/topics{path}", body, **query)

    def peek(self, namespace: str, topic: str) -> list[Found]:
        items: list[Found] = self.topic("GET", "/peek", namespace=namespace, topic=topic, limit=1000, delayed="true")
        return items


@pytest.fixture(scope="module")
def expected() -> Found:
    found: Found = json.loads((_HERE / "expected.json").read_text())
    return found


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Old]:
    directory = tmp_path_factory.mktemp("old")
    with tarfile.open(_HERE / "data-0.1.tar.xz") as archive:
        archive.extractall(directory, filter="tar")
    if os.geteuid() == 0:
        # PostgreSQL must not run as root: its owner runs it.
        owner = pwd.getpwnam("nobody")
        database = directory / "data" / "postgres"
        for path in (database, *database.rglob("*")):
            os.chown(path, owner.pw_uid, owner.pw_gid)
    with serving(directory / "data", directory / "log") as (http, _):
        maintenance = http.get("/api/v1/system/maintenance")
        # There is room now for what was refused.
        http.post("/api/v1/configure", {"queue": "full", "options": {}})
        http.post("/api/v1/system/maintenance", {"enabled": False})
        block_until(lambda: http.get("/api/v1/status/buffers")["pending"] == 0, "the spool is replayed")
        block_until(lambda: http.get("/api/v1/status/buffers")["failed"] == 0, "what was set aside is stored")
        yield Old(http, maintenance)
    assert " ERROR " not in (directory / "log").read_text()


def holds(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted is found; later versions may say more."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(key in found and holds(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(holds, found, wanted))
    return bool(found == wanted)


def check(found: Any, wanted: Any) -> None:
    assert holds(found, wanted), f"found {found}\nwanted {wanted}"


def logged(message: Found) -> Found:
    """A message with the hash that stands for a large payload."""
    text = json.dumps(message["data"], sort_keys=True).encode()
    return message | {"data_sha256": hashlib.sha256(text).hexdigest()}


def named(item: Found) -> Found:
    return {name: item[name] for name in ("id", "namespace", "topic", "lease_owner")}


def ids(messages: list[Found]) -> list[str]:
    return [message["transactionId"] for message in messages]


def in_group(group: str | None) -> dict[str, str]:
    return {"consumerGroup": group} if group else {}


def test_maintenance_is_still_on_and_the_spool_is_full(old: Old, expected: Found) -> None:
    assert old.maintenance["maintenanceMode"] is True
    assert old.maintenance["popMaintenanceMode"] is False
    # The one that was set aside may be counted too: the file that held it is still there.
    assert old.maintenance["bufferedMessages"] - expected["spool"]["pending"] in (0, 1)
    assert old.maintenance["bufferStats"]["failedCount"] == 1


def test_every_message_is_there_in_order(old: Old, expected: Found) -> None:
    for log in expected["logs"]:
        messages = old.log(log["queue"], log["partition"], "reader")
        check([logged(one) for one in messages[: len(log["messages"])]], log["messages"])


def test_spooled_pushes_are_stored_once_behind_what_was_there(old: Old, expected: Found) -> None:
    stored = {(log["queue"], log["partition"]): ids(log["messages"]) for log in expected["logs"]}
    for log in expected["spool"]["logs"]:
        before = stored.get((log["queue"], log["partition"]), [])
        messages = old.log(log["queue"], log["partition"], "replay-reader")
        # One that was spooled had been stored before, and is not there twice.
        assert [one for one in ids(messages) if not one.startswith("new-")] == before + ids(log["messages"])
        check(messages[len(before) : len(before) + len(log["messages"])], log["messages"])


def test_a_push_that_was_set_aside_is_stored_when_there_is_room(old: Old, expected: Found) -> None:
    aside = expected["set_aside"]
    messages = old.log(aside["queue"], _DEFAULT, "reader")
    assert ids(messages) == aside["log"]
    assert (messages[-1]["id"], messages[-1]["data"]) == (aside["id"], "one too many")


def test_queues_have_their_options(old: Old, expected: Found) -> None:
    for name, queue in expected["queues"].items():
        if name != "full":
            check(old.http.get(f"/api/v1/status/queues/{name}")["queue"], queue)


def test_groups_go_on_where_they_were_and_old_leases_can_be_acked(old: Old, expected: Found) -> None:
    groups = expected["groups"]
    for lease in groups["leases"]:
        group = in_group(lease["group"])
        assert old.http.pop(lease["queue"], lease["partition"], **group) == [], "it is leased"
        lease_id = lease["messages"][0]["leaseId"]
        assert old.http.post(f"/api/v1/lease/{lease_id}/extend", {"seconds": 60})["success"] is True
        results = old.http.ack(lease["messages"], group=lease["group"])
        assert [one["success"] for one in results] == [True] * len(lease["messages"])
        assert results[-1]["leaseReleased"] is True
    for place in groups["orders"]:
        messages = old.http.pop("orders", place["partition"], **in_group(place["group"]))
        found = [one for one in ids(messages) if not one.startswith("new-")]
        assert found == ([place["next"]] if place["next"] else []), place
        old.http.ack(messages, group=place["group"])
    assert ids(old.http.pop("secrets", _DEFAULT)) == ["secrets-Default-4"]


def test_failures_counted_before_count(old: Old, expected: Found) -> None:
    place = expected["groups"]["retrying"]
    (message,) = old.http.pop(place["queue"], place["partition"], **in_group(place["group"]))
    assert message["transactionId"] == place["next"]
    (result,) = old.http.ack([message], "failed", place["group"], "once too often")
    assert (result["success"], result["dlq"]) == (True, True)
    letters = old.http.get("/api/v1/dlq", queue=place["queue"], consumerGroup=place["group"])["messages"]
    assert [(one["transactionId"], one["errorMessage"]) for one in letters] == [(place["next"], "once too often")]


def test_dead_letters_are_listed_and_sent_round_again(old: Old, expected: Found) -> None:
    letters = old.http.get("/api/v1/dlq", queue="failing")["messages"]
    check(letters, expected["dead_letters"])
    answer = old.http.post("/api/v1/dlq/retry", {"queue": "failing"})
    assert (answer["retried"], answer["deadLettersRemoved"]) == (3, 6)
    assert old.http.get("/api/v1/dlq", queue="failing")["messages"] == []
    messages = old.http.pop("failing", _DEFAULT, batch=100, consumerGroup="workers")
    again = [f"failing-Default-{number}:retry-1" for number in range(3)]
    assert [one for one in ids(messages) if not one.startswith("new-")] == [
        *(f"failing-Default-{number}" for number in range(3, 6)),
        *again,
    ]


def test_old_transaction_ids_are_duplicates(old: Old, expected: Found) -> None:
    for log in expected["logs"] + expected["spool"]["logs"]:
        names = {name: log[name] for name in ("queue", "partition")}
        items = [names | {"transactionId": one["transactionId"], "payload": "again"} for one in log["messages"]]
        results = old.http.push(*items)
        assert [one["status"] for one in results] == ["duplicate"] * len(items), names
        assert [one["message_id"] for one in results] == [one["id"] for one in log["messages"]]


def test_encrypted_messages_are_encrypted_and_can_be_read(old: Old, expected: Found) -> None:
    stored = next(log["messages"] for log in expected["logs"] if log["queue"] == "secrets")
    spooled = next(log["messages"] for log in expected["spool"]["logs"] if log["queue"] == "secrets")
    partition = stored[0]["partitionId"]
    old.http.push({"queue": "secrets", "transactionId": "new-secret", "payload": {"new": 1}})
    wanted = [*stored, *spooled, {"transactionId": "new-secret", "data": {"new": 1}}]
    for message in wanted:
        found = old.http.get(f"/api/v1/messages/{partition}/{message['transactionId']}")
        assert (found["payload"], found["isEncrypted"]) == (message["data"], True)


def test_traces_are_there_and_a_transaction_can_use_an_old_lease(old: Old, expected: Found) -> None:
    traces = expected["traces"]
    check(old.http.get(f"/api/v1/traces/{traces['of']}")["traces"], traces["traces"])
    assert old.http.get("/api/v1/traces/by-name/checkout")["total"] == 3
    ack = {name: traces["leased"][name] for name in ("transactionId", "partitionId", "leaseId")}
    operations = [
        {"type": "ack", "consumerGroup": "tracing"} | ack,
        {"type": "push", "items": [{"queue": "ledger", "transactionId": "new-entry", "payload": 1}]},
    ]
    answer = old.http.post("/api/v1/transaction", {"operations": operations})
    assert answer["success"] is True, answer
    assert "new-entry" in ids(old.log("ledger", _DEFAULT, "transaction-reader"))
    assert ids(old.http.pop("orders", "p0", consumerGroup="tracing")) == ["orders-p0-1"]


def test_streams_have_their_state(old: Old, expected: Found) -> None:
    streams = expected["streams"]
    answer = old.http.post("/streams/v1/queries", streams["query"])
    assert (answer["query_id"], answer["fresh"], answer["reset"]) == (streams["query_id"], False, False)
    check(old.http.post("/streams/v1/state/get", streams["asked"])["rows"], streams["rows"])
    status, _ = old.http.call("POST", "/streams/v1/queries", streams["query"] | {"config_hash": "h2"})
    assert status == 409
    cycle = streams["asked"] | {
        "consumer_group": "streams.totals",
        "state_ops": [{"type": "upsert", "key": "new", "value": 1}, {"type": "delete", "key": "names"}],
        "push_items": [{"queue": "sums", "payload": 1, "transactionId": "new-sum"}],
    }
    assert old.http.post("/streams/v1/cycle", cycle)["success"] is True
    rows = old.http.post("/streams/v1/state/get", streams["asked"])["rows"]
    assert {row["key"] for row in rows} == {"sum", "new"}


def test_a_staged_batch_can_be_published_once(old: Old, expected: Found) -> None:
    stages = expected["stages"]
    first = old.http.post("/api/v1/stages/publish", stages["batch_0"])
    assert (first["messages"], first["repeated"]) == (10, True)
    published = old.http.post("/api/v1/stages/publish", stages["batch_1"])
    assert (published["messages"], published["duplicates"], published["repeated"]) == (10, 0, False)
    again = old.http.post("/api/v1/stages/publish", stages["batch_1"])
    assert (again["messages"], again["repeated"]) == (10, True)
    messages = old.log("staged", _DEFAULT, "stage-reader")
    of_batch_1 = [one for one in ids(messages) if one.startswith("staged-1-")]
    assert of_batch_1 == stages["messages_of_batch_1"]
    assert all(one["data"] == {"id": one["transactionId"]} for one in messages if one["transactionId"] in of_batch_1)
    assert [one["data"] for one in old.peek("jobs", "staged-1")] == stages["items_of_batch_1"]
    assert [one["data"] for one in old.peek("jobs", "staged-0")] == ["staged 0 by 0", "staged 0 by 1"]


def test_what_was_counted_is_still_counted(old: Old, expected: Found) -> None:
    metrics = expected["metrics"]
    series = old.http.get("/api/v1/analytics/queue-ops", queue=metrics["queue"], **metrics["span"])["series"]
    assert {name: sum(point[name] for point in series) for name in metrics["counted"]} == metrics["counted"]


def test_topics_have_their_items_in_order_of_service(old: Old, expected: Found) -> None:
    topics = expected["topics"]
    for topic in topics["in_order"]:
        check(old.peek(topic["namespace"], topic["topic"]), topic["items"])
    mixed = next(one["items"] for one in topics["in_order"] if one["topic"] == "mixed")
    due = [one["id"] for one in mixed if one["deliver_after"] < "2099"]
    leased = old.topic("GET", "/dequeue", namespace="jobs", topic="mixed", limit=100, lease=600)
    assert [one["id"] for one in leased] == due
    assert [one["success"] for one in old.topic("POST", "/release", [named(one) for one in leased])] == [True] * len(
        due
    )


def test_old_leases_of_items_hold(old: Old, expected: Found) -> None:
    first, second, third = expected["topics"]["leased"]
    stranger = named(first) | {"lease_owner": "somebody else"}
    assert [one["success"] for one in old.topic("POST", "/ack", [stranger])] == [False]
    assert [one["success"] for one in old.topic("POST", "/extend", [named(first) | {"seconds": 60}])] == [True]
    assert [one["success"] for one in old.topic("POST", "/ack", [named(first)])] == [True]
    assert [one["success"] for one in old.topic("POST", "/ack", [named(first)])] == [False]
    (nacked,) = old.topic("POST", "/nack", [named(second) | {"error": "failed today"}])
    assert (nacked["success"], nacked["dlq"]) == (True, False)
    assert [one["success"] for one in old.topic("POST", "/release", [named(third)])] == [True]
    ready = old.topic("GET", "/peek", namespace="jobs", topic="mixed", limit=2)
    assert {one["id"]: (one["data"], one["retries"]) for one in ready} == {
        second["id"]: ({"leased": 1}, 1),
        third["id"]: ({"leased": 2}, 0),
    }
    # As it was, for those who ask for the order of service.
    leased = old.topic("GET", "/dequeue", namespace="jobs", topic="mixed", limit=2)
    assert all(one["success"] for one in old.topic("POST", "/ack", [named(one) for one in leased]))


def test_buffered_items_that_were_in_no_table_are_stored_in_order(old: Old, expected: Found) -> None:
    topics = expected["topics"]
    waiting, stored = topics["waiting"], topics["stored_of_the_buffered"]
    block_until(lambda: len(old.peek("fastlane", "lane")) == len(waiting) + len(stored), "the log is flushed")
    everything = [{"id": id, "data": f"stored {n}", "priority": n % 2} for n, id in enumerate(stored)] + waiting
    in_order = sorted(
        everything, key=lambda one: (one.get("priority", 0), "deliver_after" in one, everything.index(one))
    )
    peeked = old.peek("fastlane", "lane")
    assert [one["id"] for one in peeked] == [one["id"] for one in in_order]
    assert [one["data"] for one in peeked] == [one["data"] for one in in_order]
    assert old.topic("GET", "/modes") == topics["modes"]
    due = [one for one in in_order if "deliver_after" not in one]
    leased = old.topic("GET", "/dequeue", namespace="fastlane", topic="lane", limit=1000)
    assert [one["id"] for one in leased] == [one["id"] for one in due]
    assert all(one["success"] for one in old.topic("POST", "/ack", [named(one) for one in leased]))


def test_old_idempotency_keys_are_known(old: Old, expected: Found) -> None:
    for key, id in expected["topics"]["keys"].items():
        item = {"namespace": "jobs", "topic": "mixed", "data": "again", "idempotency_key": key}
        assert old.topic("POST", "/enqueue", [item]) == [id]


def test_dead_letters_of_topics_are_listed_and_sent_round_again(old: Old, expected: Found) -> None:
    dead = expected["topics"]["dead"]
    where = {"namespace": "jobs", "topic": "fragile"}
    check(old.topic("GET", "/dlq", **where), dead)
    refs = [{"id": one["id"]} | where for one in dead]
    assert [one["success"] for one in old.topic("POST", "/dlq/retry", refs[:2])] == [True, True]
    assert [one["success"] for one in old.topic("POST", "/dlq/delete", refs[2:])] == [True]
    assert old.topic("GET", "/dlq", **where) == []
    assert {one["id"] for one in old.topic("GET", "/dequeue", **where)} == {one["id"] for one in dead[:2]}


def test_topics_have_their_options_and_quotas(old: Old, expected: Found) -> None:
    topics = expected["topics"]
    for wanted in topics["options"]:
        (found,) = old.topic("GET", "/counts", namespace=wanted["namespace"], topic=wanted["topic"])
        check(found["options"], wanted["options"])
    check(old.topic("GET", "/quotas"), topics["quotas"])
    item = {"namespace": "limited", "topic": "new", "data": "new"}
    statuses = [old.http.call("POST", "/api/v1/topics/enqueue", [item])[0] for _ in range(6)]
    assert statuses == [200] * 5 + [429]


def test_old_queues_and_topics_take_new_messages(old: Old, expected: Found) -> None:
    for log in expected["logs"]:
        where = {name: log[name] for name in ("queue", "partition")}
        group = "new-group"
        before = old.http.pop(**where, consumerGroup=group, batch=1000, autoAck="true")
        assert len(before) >= len(log["messages"])
        results = old.http.push(*(where | {"transactionId": f"new-{n}", "payload": n} for n in range(3)))
        assert [one["status"] for one in results] == ["queued"] * 3
        messages = old.http.pop(**where, consumerGroup=group, batch=10)
        assert ids(messages) == ["new-0", "new-1", "new-2"]
        assert all(one["success"] for one in old.http.ack(messages, group=group))
        # The group that had read everything reads on.
        assert ids(old.http.pop(**where, consumerGroup="auditor", batch=1000, autoAck="true"))[-3:] == ids(messages)
    newest = max(one["id"] for topic in expected["topics"]["in_order"] for one in topic["items"])
    for namespace, topic in (("jobs", "receipts"), ("fastlane", "new")):
        item = {"namespace": namespace, "topic": topic, "data": "new", "priority": -100}
        (id,) = old.topic("POST", "/enqueue", [item])
        assert id > newest
        (leased,) = old.topic("GET", "/dequeue", namespace=namespace, topic=topic, limit=1, wait="true")
        assert (leased["id"], leased["data"]) == (id, "new")
        assert [one["success"] for one in old.topic("POST", "/ack", [named(leased)])] == [True]
