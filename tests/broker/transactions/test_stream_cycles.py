"""The three streams routes: registering queries, cycles, and state."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from queen.storage.statements import load_statements
from tests.conftest import StartServer
from tests.support.api import Answer, Api, payloads
from tests.support.database import Connection, dead_letters, expire_leases, stored_ids, stored_messages

GROUP = "streams.q"


async def register(api: Api, name: str = "q", config_hash: str = "h1", **fields: Any) -> Answer:
    body = {"name": name, "source_queue": "in", "config_hash": config_hash} | fields
    return await api.call("POST", "/streams/v1/queries", body)


async def query_id(api: Api, name: str = "q") -> str:
    answer = await register(api, name)
    assert answer.status == 200, answer
    id: str = answer.body["query_id"]
    return id


async def cycle(api: Api, query: str, partition: str, **fields: Any) -> Any:
    body = {"query_id": query, "partition_id": partition, "consumer_group": GROUP} | fields
    answer = await api.call("POST", "/streams/v1/cycle", body)
    assert answer.status == 200, answer
    return answer.body


async def state(api: Api, query: str, partition: str, **fields: Any) -> dict[str, Any]:
    body = {"query_id": query, "partition_id": partition} | fields
    answer = await api.call("POST", "/streams/v1/state/get", body)
    assert answer.status == 200, answer
    assert answer.body["success"] is True
    return {row["key"]: row["value"] for row in answer.body["rows"]}


async def popped(api: Api, count: int, **query: Any) -> list[dict[str, Any]]:
    """Messages of queue `in`, leased to the group of the query."""
    await api.push("in", *range(count), ids=[f"t-{number}" for number in range(count)])
    messages = await api.pop("in", consumerGroup=GROUP, batch=count, **query)
    assert len(messages) == count
    return messages


def ack(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    last = messages[-1]
    return {
        "transactionId": last["transactionId"],
        "leaseId": last["leaseId"],
        "status": "completed",
        "count": len(messages),
    } | fields


def upsert(key: str, value: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "upsert", "key": key, "value": value} | fields


def delete(key: str, **fields: Any) -> dict[str, Any]:
    return {"type": "delete", "key": key} | fields


async def test_a_query_is_registered_once_and_met_again(api: Api) -> None:
    first = await register(api, sink_queue="out")
    assert first.status == 200
    assert first.body["fresh"] is True
    assert first.body["reset"] is False
    assert first.body["success"] is True
    assert (first.body["name"], first.body["config_hash"]) == ("q", "h1")
    again = await register(api)
    assert again.body["fresh"] is False
    assert again.body["query_id"] == first.body["query_id"]
    other = await register(api, "other")
    assert other.body["query_id"] != first.body["query_id"]


async def test_other_operators_conflict_unless_the_query_is_reset(api: Api) -> None:
    query = await query_id(api)
    (message,) = await popped(api, 1)
    await cycle(api, query, message["partitionId"], state_ops=[upsert("k", 1)])
    conflict = await register(api, config_hash="h2")
    assert conflict.status == 409
    assert conflict.body["success"] is False
    assert conflict.body["query_id"] == query
    assert "config_hash mismatch" in conflict.body["error"]
    assert await state(api, query, message["partitionId"]) == {"k": 1}
    same = await register(api, reset=True)
    assert (same.body["reset"], same.body["fresh"]) == (False, False)
    assert await state(api, query, message["partitionId"]) == {"k": 1}
    reset = await register(api, config_hash="h2", reset=True)
    assert reset.status == 200
    assert (reset.body["reset"], reset.body["query_id"]) == (True, query)
    assert await state(api, query, message["partitionId"]) == {}
    assert (await register(api, config_hash="h1")).status == 409


async def test_registering_at_the_same_time_makes_one_query(api: Api) -> None:
    answers = await asyncio.gather(*(register(api) for _ in range(8)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body["query_id"] for answer in answers}) == 1
    assert sum(answer.body["fresh"] for answer in answers) == 1


async def test_registering_names_the_partitions_that_have_state(api: Api) -> None:
    query = await query_id(api)
    for partition in ("a", "b", "c"):
        await api.push("in", 1, partition=partition)
    messages = await api.pop("in", consumerGroup=GROUP, batch=3, partitions=3)
    for message in messages[:2]:
        await cycle(api, query, message["partitionId"], state_ops=[upsert("x", 1), upsert("y", 2)])
    answer = await register(api)
    assert sorted(answer.body["partitions"], key=lambda one: str(one["partition"])) == [
        {"partition_id": message["partitionId"], "partition": message["partition"]}
        for message in sorted(messages[:2], key=lambda one: str(one["partition"]))
    ]


async def test_a_cycle_writes_state_pushes_and_acks_together(api: Api, connection: Connection) -> None:
    query = await query_id(api)
    messages = await popped(api, 3)
    partition = messages[0]["partitionId"]
    done = await cycle(
        api,
        query,
        partition,
        state_ops=[upsert("a", {"n": 1}), upsert("b", None), {"type": "upsert", "key": "c"}],
        push_items=[{"queue": "out", "partition": "p", "payload": {"n": number}} for number in range(3)],
        ack=ack(messages),
    )
    results = done.pop("push_results")
    assert done == {
        "success": True,
        "query_id": query,
        "partition_id": partition,
        "queueName": "in",
        "state_ops_applied": 3,
        "ack_result": {"success": True, "count": 3, "lease_released": True, "dlq": False},
    }
    assert [result["status"] for result in results] == ["queued"] * 3
    assert [result["index"] for result in results] == [0, 1, 2]
    assert await state(api, query, partition) == {"a": {"n": 1}, "b": None, "c": {}}
    assert [message["data"] for message in await api.pop("out", batch=5)] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert await api.pop("in", consumerGroup=GROUP) == []
    assert [message.id for message in await stored_messages(connection, "out", "p")] == [
        result["message_id"] for result in results
    ]


async def test_a_cycle_wakes_waiting_pops_of_its_sink_and_its_source(start_server: StartServer) -> None:
    one = await start_server(0, num_workers=2)
    other = await start_server(1, num_workers=2)
    query = await query_id(one)
    messages = await popped(one, 3)
    await one.push("in", "later")
    waiting = [
        asyncio.create_task(api.pop("out", wait=True, timeout=20_000, consumerGroup=f"g{index}"))
        for index, api in enumerate((one, other))
    ]
    source = asyncio.create_task(other.pop("in", wait=True, timeout=20_000, consumerGroup=GROUP))
    await asyncio.sleep(0.2)
    await cycle(one, query, messages[0]["partitionId"], push_items=[{"queue": "out", "payload": 1}], ack=ack(messages))
    assert [[message["data"] for message in await task] for task in waiting] == [[1], [1]]
    assert [message["data"] for message in await source] == ["later"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"state_ops": [upsert("a", 1), {"type": "merge", "key": "a"}]}, "Unknown state_op type: merge"),
        ({"ack": {"leaseId": "x"}}, "ack.transactionId is required"),
        ({"ack": {"transactionId": "nobody"}}, "Message not found"),
        ({"ack": {"transactionId": "t-0", "leaseId": "nonsense"}}, "Invalid or expired lease"),
        ({"ack": {"transactionId": "t-0", "leaseId": str(uuid.uuid4())}}, "Invalid or expired lease"),
        ({"ack": {"transactionId": "t-0", "status": "later"}}, "Unknown ack.status: later"),
        ({"ack": {"transactionId": "t-0", "status": "retry"}}, "Unknown ack.status: retry"),
        ({"state_ops": [delete("absent")]}, "State changed since it was read: absent"),
        ({"state_ops": [upsert("k", 1, if_version=7)]}, "State changed since it was read: k"),
        ({"state_ops": [upsert("old", 1, if_version=None)]}, "State changed since it was read: old"),
        ({"config_hash": "h2"}, "config_hash mismatch"),
    ],
)
async def test_a_cycle_that_fails_does_nothing_at_all(
    api: Api, connection: Connection, fields: dict[str, Any], error: str
) -> None:
    query = await query_id(api)
    messages = await popped(api, 2)
    partition = messages[0]["partitionId"]
    await cycle(api, query, partition, state_ops=[upsert("old", 0)])
    full = {
        "state_ops": [upsert("new", 1), delete("old")],
        "push_items": [{"queue": "out", "payload": 1}],
        "ack": ack(messages),
    } | fields
    answer = await cycle(api, query, partition, **full)
    assert answer["success"] is False
    assert error in answer["error"]
    assert await state(api, query, partition) == {"old": 0}
    assert await stored_ids(connection, "out") == []
    await expire_leases(connection, "in")
    assert len(await api.pop("in", "Default", consumerGroup=GROUP, batch=5)) == 2


async def test_state_operations_of_a_cycle_apply_in_their_order(api: Api, connection: Connection) -> None:
    query = await query_id(api)
    messages = await popped(api, 1)
    partition = messages[0]["partitionId"]
    answer = await cycle(
        api,
        query,
        partition,
        state_ops=[
            upsert("brief", 1),
            delete("brief"),
            upsert("b", 1, if_version=None),
            upsert("b", 2, if_version=None),
        ],
        push_items=[{"queue": "out", "payload": 1}],
        ack=ack(messages),
    )
    assert (answer["success"], answer["state_ops_applied"]) == (True, 4), answer
    assert await state(api, query, partition) == {"b": 2}
    assert len(await stored_ids(connection, "out")) == 1


async def test_a_cycle_refused_because_state_changed_gives_its_messages_back_at_once(api: Api) -> None:
    query = await query_id(api)
    messages = await popped(api, 2)
    partition = messages[0]["partitionId"]
    refused = await cycle(api, query, partition, state_ops=[upsert("k", 1, if_version=7)], ack=ack(messages))
    assert refused["error"] == "State changed since it was read: k"
    again = await api.pop("in", "Default", consumerGroup=GROUP, batch=5)
    assert [one["transactionId"] for one in again] == [one["transactionId"] for one in messages]
    accepted = await cycle(api, query, partition, state_ops=[upsert("k", 1, if_version=None)], ack=ack(again))
    assert accepted["success"] is True


async def test_unknown_queries_and_partitions_are_refused(api: Api) -> None:
    query = await query_id(api)
    messages = await popped(api, 1)
    partition = messages[0]["partitionId"]
    stranger = str(uuid.uuid4())
    assert "Query not found" in (await cycle(api, stranger, partition, state_ops=[upsert("k", 1)]))["error"]
    assert "query_id must be a UUID" in (await cycle(api, "nonsense", partition))["error"]
    assert (await cycle(api, query, stranger, ack=ack(messages)))["error"] == "Message not found"
    assert "Partition not found" in (await cycle(api, query, stranger))["error"]
    # Without state there is nothing that needs the query.
    assert (await cycle(api, stranger, partition, ack=ack(messages)))["success"] is True


@pytest.mark.parametrize("keep", [False, True])
async def test_a_cycle_sent_again_after_its_answer_was_lost_changes_nothing(
    api: Api, connection: Connection, keep: bool
) -> None:
    query = await query_id(api)
    messages = await popped(api, 4)
    partition = messages[0]["partitionId"]
    await cycle(api, query, partition, state_ops=[upsert("closed", 1)])
    body = {
        "state_ops": [upsert("n", 1), delete("closed")],
        "push_items": [{"queue": "out", "payload": 1}],
        "ack": ack(messages[:2]),
        "release_lease": not keep,
    }
    first = await cycle(api, query, partition, **body)
    again = await cycle(api, query, partition, **body)
    assert first["success"] is again["success"] is True
    assert again["replayed"] is True
    assert again["ack_result"] == first["ack_result"]
    assert len(await stored_ids(connection, "out")) == 1
    assert await state(api, query, partition) == {"n": 1}
    # Nor does it when the next batch has been leased meanwhile.
    await expire_leases(connection, "in")
    rest = await api.pop("in", "Default", consumerGroup=GROUP, batch=9)
    assert [message["data"] for message in rest] == [2, 3]
    late = await cycle(api, query, partition, **body)
    assert late["success"] is not keep or late["error"] == "Invalid or expired lease"
    assert len(await stored_ids(connection, "out")) == 1


async def test_a_partial_ack_keeps_the_lease_and_the_tail_comes_back_after_it(api: Api, connection: Connection) -> None:
    query = await query_id(api)
    messages = await popped(api, 5)
    partition = messages[0]["partitionId"]
    done = await cycle(api, query, partition, ack=ack(messages[:2]), release_lease=False)
    assert done["ack_result"] == {"success": True, "count": 2, "lease_released": False, "dlq": False}
    assert await api.pop("in", consumerGroup=GROUP) == []
    await expire_leases(connection, "in")
    rest = await api.pop("in", "Default", consumerGroup=GROUP, batch=9)
    assert [message["data"] for message in rest] == [2, 3, 4]


async def test_an_ack_that_counts_the_whole_lease_consumes_it_whichever_message_it_names(api: Api) -> None:
    query = await query_id(api)
    messages = await popped(api, 3)
    swapped = [messages[0], messages[2], messages[1]]
    done = await cycle(api, query, messages[0]["partitionId"], ack=ack(swapped))
    assert done["success"] is True
    assert await api.pop("in", consumerGroup=GROUP) == []


@pytest.mark.parametrize("status", ["failed", "dlq"])
async def test_a_cycle_may_give_a_message_up(api: Api, connection: Connection, status: str) -> None:
    query = await query_id(api)
    messages = await popped(api, 3)
    done = await cycle(
        api, query, messages[0]["partitionId"], ack=ack(messages[:1], status=status, error="cannot be read")
    )
    assert done["ack_result"] == {"success": True, "count": 1, "lease_released": True, "dlq": True}
    assert await dead_letters(connection, "in") == [("t-0", "cannot be read", 0)]
    rest = await api.pop("in", consumerGroup=GROUP, batch=9)
    assert [message["data"] for message in rest] == [1, 2]


async def test_an_ack_without_a_lease_needs_none(api: Api) -> None:
    query = await query_id(api)
    messages = await popped(api, 3)
    done = await cycle(api, query, messages[0]["partitionId"], ack={"transactionId": "t-1"})
    assert done["success"] is True
    assert [message["data"] for message in await api.pop("in", consumerGroup=GROUP, batch=9)] == [2]


async def test_a_lease_that_has_ended_refuses_the_cycle(api: Api, connection: Connection) -> None:
    query = await query_id(api)
    messages = await popped(api, 2)
    await expire_leases(connection, "in")
    answer = await cycle(api, query, messages[0]["partitionId"], ack=ack(messages), state_ops=[upsert("k", 1)])
    assert answer["error"] == "Invalid or expired lease"
    assert await state(api, query, messages[0]["partitionId"]) == {}


async def test_duplicates_in_a_sink_are_passed_over_and_named(api: Api) -> None:
    query = await query_id(api)
    messages = await popped(api, 1)
    (first,) = await api.push("out", 0, ids=["same"])
    done = await cycle(
        api,
        query,
        messages[0]["partitionId"],
        push_items=[{"queue": "out", "payload": n, "transactionId": id} for n, id in enumerate(["same", "new", "new"])],
        ack=ack(messages),
    )
    assert [result["status"] for result in done["push_results"]] == ["duplicate", "queued", "duplicate"]
    assert done["push_results"][0]["message_id"] == first["message_id"]
    assert [message["data"] for message in await api.pop("out", batch=9)] == [0, 1]


async def test_a_full_sink_refuses_the_cycle(api: Api) -> None:
    await api.configure("out", maxSize=2)
    query = await query_id(api)
    messages = await popped(api, 1)
    answer = await cycle(
        api,
        query,
        messages[0]["partitionId"],
        push_items=[{"queue": "out", "payload": n} for n in range(3)],
        ack=ack(messages),
    )
    assert answer["success"] is False
    assert "would exceed max capacity" in answer["error"]
    assert await api.pop("out") == []


async def test_the_sink_keeps_the_order_of_the_items_over_many_partitions(api: Api, connection: Connection) -> None:
    query = await query_id(api)
    messages = await popped(api, 1)
    await cycle(
        api,
        query,
        messages[0]["partitionId"],
        push_items=[{"queue": "out", "partition": f"p{n % 3}", "payload": n} for n in range(30)],
        ack=ack(messages),
    )
    for partition in range(3):
        stored = await stored_messages(connection, "out", f"p{partition}")
        assert [int(message.payload) for message in stored] == list(range(partition, 30, 3))


async def test_cycles_of_one_query_on_one_partition_go_one_after_the_other(api: Api) -> None:
    query = await query_id(api)
    messages = await popped(api, 1)
    partition = messages[0]["partitionId"]

    async def add_one() -> None:
        while True:
            rows = (
                await api.call("POST", "/streams/v1/state/get", {"query_id": query, "partition_id": partition})
            ).body["rows"]
            value, version = (rows[0]["value"], rows[0]["version"]) if rows else (0, None)
            done = await cycle(api, query, partition, state_ops=[upsert("n", value + 1, if_version=version)])
            if done["success"]:
                return

    await asyncio.gather(*(add_one() for _ in range(20)))
    assert await state(api, query, partition) == {"n": 20}


async def test_the_last_operation_on_a_key_counts(api: Api) -> None:
    query = await query_id(api)
    (message,) = await popped(api, 1)
    done = await cycle(
        api,
        query,
        message["partitionId"],
        state_ops=[upsert("a", 1), upsert("a", 2), upsert("b", 1), delete("b"), delete("c")],
    )
    assert done["state_ops_applied"] == 5
    assert await state(api, query, message["partitionId"]) == {"a": 2}


async def test_state_is_read_by_key_by_prefix_by_ripeness_and_in_pages(api: Api) -> None:
    query = await query_id(api)
    (message,) = await popped(api, 1)
    partition = message["partitionId"]
    values: dict[str, Any] = {f"w\x1f{n}": {"acc": n, "windowEnd": n * 1000} for n in range(5)}
    values |= {"w%": {"windowEnd": "soon"}, "w_": [1], "wx": {"windowEnd": True}, "x": None, "\U0010ffffz": 1}
    await cycle(api, query, partition, state_ops=[upsert(key, value) for key, value in values.items()])
    assert await state(api, query, partition) == values
    assert list(await state(api, query, partition)) == sorted(values)
    assert await state(api, query, partition, keys=["x", "nobody", "w_"]) == {"w_": [1], "x": None}
    assert await state(api, query, partition, keys=[]) == values
    assert set(await state(api, query, partition, key_prefix="w\x1f")) == {f"w\x1f{n}" for n in range(5)}
    # A prefix is taken as it is: neither % nor _ stands for anything.
    assert set(await state(api, query, partition, key_prefix="w%")) == {"w%"}
    assert set(await state(api, query, partition, key_prefix="\U0010ffff")) == {"\U0010ffffz"}
    assert set(await state(api, query, partition, ripe_at_or_before=2000)) == {f"w\x1f{n}" for n in range(3)}
    assert set(await state(api, query, partition, ripe_at_or_before=2000, keys=["w\x1f1", "w\x1f3"])) == {"w\x1f1"}
    pages, after = [], None
    while True:
        asked = {"query_id": query, "partition_id": partition, "limit": 3, "after": after}
        body = (await api.call("POST", "/streams/v1/state/get", asked)).body
        pages.append([row["key"] for row in body["rows"]])
        if not body["more"]:
            break
        after = pages[-1][-1]
    assert [key for page in pages for key in page] == sorted(values)
    assert [len(page) for page in pages] == [3, 3, 3, 1]


async def test_state_belongs_to_one_query_and_one_partition(api: Api) -> None:
    one, other = await query_id(api, "one"), await query_id(api, "other")
    await api.push("in", 1, partition="a")
    await api.push("in", 1, partition="b")
    first, second = (message["partitionId"] for message in await api.pop("in", batch=2, partitions=2))
    await cycle(api, one, first, state_ops=[upsert("k", 1)])
    assert await state(api, one, first) == {"k": 1}
    assert await state(api, one, second) == {}
    assert await state(api, other, first) == {}
    assert await state(api, str(uuid.uuid4()), first) == {}
    assert await state(api, one, str(uuid.uuid4())) == {}


async def test_state_of_an_encrypted_queue_is_encrypted(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(queen_encryption_key=("ab" * 32,))
    await api.configure("in", encryptionEnabled=True)
    query = await query_id(api)
    (message,) = await popped(api, 1)
    await cycle(api, query, message["partitionId"], state_ops=[upsert("k", "a secret")])
    assert await state(api, query, message["partitionId"]) == {"k": "a secret"}
    (row,) = await connection.fetch("SELECT value FROM queen.stream_state")
    assert b"secret" not in row["value"]


async def test_state_goes_with_its_partition(api: Api, connection: Connection) -> None:
    query = await query_id(api)
    (message,) = await popped(api, 1)
    await cycle(api, query, message["partitionId"], state_ops=[upsert("k", 1)])
    await api.call("DELETE", "/api/v1/resources/queues/in")
    assert api.worker is not None
    await api.worker.broker.jobs.run_once()
    assert await connection.fetchval("SELECT count(*) FROM queen.stream_state") == 0


async def test_state_is_found_by_index(dsn: str, connection: Connection) -> None:
    await connection.execute(
        "INSERT INTO queen.stream_state (partition_id, query_id, key, value, window_end)"
        " SELECT p, q, 'tumb:1\x1f' || k, 'x', k FROM generate_series(1, 50) p, generate_series(1, 4) q,"
        " generate_series(1, 200) k"
    )
    await connection.execute("ANALYZE queen.stream_state")
    statements = load_statements()
    everything = (1, 7, None, None, None, None, None, 100, 1 << 20)
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("stream_state", everything),
        ("stream_state", (1, 7, ["tumb:1\x1f5", "nobody"], *everything[3:])),
        ("stream_state", (1, 7, None, "tumb:1\x1f", "tumb:1 ", *everything[5:])),
        ("stream_state", (1, 7, None, None, None, 5.0, None, 100, 1 << 20)),
        ("stream_state", (1, 7, None, None, None, None, "tumb:1\x1f5", 100, 1 << 20)),
        ("stream_versions", (1, 7, ["tumb:1\x1f5"])),
        ("delete_stream_state", (1, 7, ["tumb:1\x1f5"])),
        ("stream_partitions", (1, 100)),
        ("sweep_stream_state", ([7, 8], 100)),
    ]
    for name, arguments in cases:
        plan = "\n".join(row[0] for row in await connection.fetch("EXPLAIN " + statements[name], *arguments))
        assert "Seq Scan on stream_state" not in plan, f"{name}\n{plan}"


async def test_a_cycle_takes_a_thousand_messages_with_their_state_and_results(api: Api) -> None:
    query = await query_id(api)
    await api.push("in", *range(1000))
    messages = await api.pop("in", consumerGroup=GROUP, batch=1000)
    done = await cycle(
        api,
        query,
        messages[0]["partitionId"],
        state_ops=[upsert(f"w\x1f{n}", {"acc": {"sum": n}, "windowStart": 0, "windowEnd": n}) for n in range(100)],
        push_items=[{"queue": "out", "payload": {"sum": n}} for n in range(100)],
        ack=ack(messages),
    )
    assert done["success"] is True
    assert len(messages) == 1000
    assert await api.pop("in", consumerGroup=GROUP) == []
    assert len(await state(api, query, messages[0]["partitionId"])) == 100
    assert payloads(await api.pop("out", batch=200)) == [{"sum": n} for n in range(100)]


async def test_a_deleted_query_is_forgotten_with_its_state_and_its_cycles_are_refused(
    start_server: StartServer, connection: Connection
) -> None:
    deleting, other = await start_server(), await start_server()
    query, kept = await query_id(deleting), await query_id(deleting, "kept")
    messages = await popped(deleting, 2)
    partition = messages[0]["partitionId"]
    written = [{"type": "upsert", "key": "k", "value": 1}]
    for each in (query, kept):
        assert (await cycle(other, each, partition, state_ops=written))["success"]
    answer = await deleting.call("DELETE", "/streams/v1/queries/q")
    assert (answer.status, answer.body) == (200, {"success": True, "name": "q", "state_rows": 1})
    # Another worker knows the query still.
    for fields in ({}, {"config_hash": "h1"}):
        refused = await cycle(other, query, partition, state_ops=written, ack=ack(messages), **fields)
        assert not refused["success"]
        assert "deleted" in refused["error"] or "not found" in refused["error"].lower()
    assert await connection.fetchval("SELECT count(*) FROM queen.stream_state") == 1
    assert await state(deleting, kept, partition) == {"k": 1}
    assert (await deleting.call("DELETE", "/streams/v1/queries/q")).status == 404
    again = await register(other, config_hash="h2")
    assert again.status == 200
    assert again.body["fresh"]
    assert again.body["query_id"] != query
