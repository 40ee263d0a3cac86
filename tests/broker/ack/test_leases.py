"""Leases: one at a time, redelivery right after the last ack, and what late, repeated and wrong acks do."""

from __future__ import annotations

import asyncio
from datetime import datetime

import pytest

from queen.broker.ack.rules import ALREADY_COMMITTED, UNRESOLVABLE
from tests.support.api import Api, payloads
from tests.support.database import Connection, dead_letters, expire_leases, make_queue


async def test_while_a_batch_is_leased_the_group_gets_nothing_else(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    assert payloads(await api.pop("q")) == [1]
    assert await api.pop("q") == []
    assert await api.pop("q", "Default") == []
    assert payloads(await api.pop("q", consumerGroup="other")) == [1]


async def test_a_finished_lease_makes_room_for_the_next_message(api: Api) -> None:
    await api.push("q", 1, 2)
    (result,) = await api.ack(await api.pop("q"))
    assert result["leaseReleased"] is True
    assert payloads(await api.pop("q")) == [2]


async def test_the_answer_of_an_ack_has_the_shape_that_clients_read(api: Api) -> None:
    await api.push("q", 1, ids=["t-1"])
    (message,) = await api.pop("q")
    body = {"transactionId": "t-1", "partitionId": message["partitionId"], "leaseId": message["leaseId"]}
    answer = await api.call("POST", "/api/v1/ack", body)
    assert answer.status == 200
    assert answer.body == [
        {
            "index": 0,
            "transactionId": "t-1",
            "success": True,
            "error": None,
            "queueName": "q",
            "partitionName": "Default",
            "leaseReleased": True,
            "dlq": False,
        }
    ]


async def test_a_lease_that_ends_by_itself_is_redelivered_to_a_waiting_pop(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", lease_time=1)
    await api.push("q", 1, 2)
    begun = asyncio.get_running_loop().time()
    first = await api.pop("q", batch=2)
    second = await api.pop("q", batch=2, wait=True, timeout=60_000)
    assert payloads(second) == payloads(first) == [1, 2]
    assert asyncio.get_running_loop().time() - begun > 0.9
    assert second[0]["leaseId"] != first[0]["leaseId"]


@pytest.mark.parametrize("partition", [None, "Default"])
async def test_after_an_expired_lease_redelivery_starts_right_after_the_last_ack(
    api: Api, connection: Connection, partition: str | None
) -> None:
    await api.push("q", 1, 2, 3, 4, 5)
    messages = await api.pop("q", batch=4)
    await api.ack(messages[:2])
    await expire_leases(connection, "q")
    assert payloads(await api.pop("q", partition, batch=10)) == [3, 4, 5]


async def test_a_late_ack_changes_nothing(api: Api, connection: Connection) -> None:
    await api.push("q", 1, 2)
    late = await api.pop("q", batch=2)
    await expire_leases(connection, "q")
    for status in ("completed", "failed", "retry", "dlq"):
        results = await api.ack(late, status)
        assert [(result["success"], result["error"]) for result in results] == [(False, "Invalid or expired lease")] * 2
    again = await api.pop("q", "Default", batch=2)
    assert payloads(again) == [1, 2]
    assert not any(result["success"] for result in await api.ack(late))
    assert all(result["success"] for result in await api.ack(again))
    assert await dead_letters(connection, "q") == []


async def test_an_ack_may_be_repeated_when_its_answer_was_lost(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    messages = await api.pop("q", batch=2)
    for _ in range(3):
        assert all(result["success"] for result in await api.ack(messages))
    assert payloads(await api.pop("q")) == [3]
    # The same once the next lease is out.
    assert all(result["success"] for result in await api.ack(messages))


async def test_messages_acked_one_by_one_end_the_lease_with_the_last(api: Api) -> None:
    await api.push("q", 1, 2, 3, 4)
    messages = await api.pop("q", batch=3)
    released = []
    for message in messages:
        (result,) = await api.ack([message])
        released.append(result["leaseReleased"])
    assert released == [False, False, True]
    assert payloads(await api.pop("q")) == [4]


async def test_acking_a_message_consumes_what_is_before_it(api: Api, connection: Connection) -> None:
    await api.push("q", 1, 2, 3, 4)
    messages = await api.pop("q", batch=4)
    await api.ack([messages[2]])
    (result,) = await api.ack([messages[0]])
    assert result["success"]
    await expire_leases(connection, "q")
    assert payloads(await api.pop("q", "Default", batch=4)) == [4]


async def test_an_ack_without_a_lease_id_is_not_checked_against_one(api: Api, connection: Connection) -> None:
    await api.push("q", 1, 2)
    messages = await api.pop("q", batch=1)
    await expire_leases(connection, "q")
    assert all(result["success"] for result in await api.ack(messages, lease=False))
    assert payloads(await api.pop("q", "Default", batch=5)) == [2]


async def test_a_message_can_be_acked_by_a_group_that_never_popped_it(api: Api) -> None:
    await api.push("q", 1, 2, 3)
    messages = await api.pop("q", batch=3)
    (result,) = await api.ack([messages[1]], group="late", lease=False)
    assert result["success"]
    assert payloads(await api.pop("q", batch=5, consumerGroup="late")) == [3]


async def test_acks_of_what_does_not_exist_say_so_and_spare_their_neighbours(api: Api) -> None:
    await api.push("q", 1)
    (message,) = await api.pop("q")
    unknown = message | {"transactionId": "nobody"}
    elsewhere = message | {"partitionId": "51756565-0000-8000-8000-00000000ffff"}
    foreign = message | {"partitionId": "51756565-0007-8000-8000-000000000001"}
    no_id = message | {"partitionId": "not an id"}
    wrong_lease = message | {"leaseId": "not a lease"}
    results = await api.ack([unknown, elsewhere, foreign, no_id, wrong_lease, message])
    assert [(result["success"], result["error"]) for result in results] == [
        (False, UNRESOLVABLE),
        (False, UNRESOLVABLE),
        (False, UNRESOLVABLE),
        (False, UNRESOLVABLE),
        (False, "Invalid or expired lease"),
        (True, None),
    ]
    assert [result["index"] for result in results] == list(range(6))


async def test_an_unknown_status_does_nothing(api: Api) -> None:
    await api.push("q", 1)
    messages = await api.pop("q")
    (result,) = await api.ack(messages, "whatever")
    assert (result["success"], result["error"]) == (False, None)
    assert all(result["success"] for result in await api.ack(messages))


async def test_a_failed_batch_is_redelivered_whole_until_its_retries_are_spent(
    api: Api, connection: Connection
) -> None:
    await make_queue(connection, "q", retry_limit=2, retry_delay=0)
    await api.push("q", 1, 2, 3, ids=["a", "b", "c"])
    for _ in range(2):
        messages = await api.pop("q", batch=3)
        assert payloads(messages) == [1, 2, 3]
        results = await api.ack(messages, "failed", error="boom")
        assert [(result["success"], result["dlq"]) for result in results] == [(True, False)] * 3
    results = await api.ack(await api.pop("q", batch=3), "failed", error="boom")
    assert [(result["success"], result["dlq"]) for result in results] == [(True, True)] * 3
    assert await api.pop("q", batch=3) == []
    assert await dead_letters(connection, "q") == [("a", "boom", 2), ("b", "boom", 2), ("c", "boom", 2)]
    # The retries stay spent until a batch is completed.
    await api.push("q", 4)
    assert (await api.ack(await api.pop("q"), "failed"))[0]["dlq"] is True
    await api.push("q", 5)
    await api.ack(await api.pop("q"))
    await api.push("q", 6)
    assert (await api.ack(await api.pop("q"), "failed"))[0]["dlq"] is False


async def test_a_failure_in_the_middle_at_the_last_retry_loses_nothing(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", retry_limit=1, retry_delay=0)
    await api.push("q", 1, 2, 3, ids=["a", "b", "c"])
    await api.ack(await api.pop("q", batch=3), ["completed", "failed", "completed"])
    messages = await api.pop("q", batch=3)
    assert payloads(messages) == [2, 3]
    results = await api.ack(messages, ["failed", "completed"])
    assert [(result["success"], result["dlq"]) for result in results] == [(True, True), (True, False)]
    assert await api.pop("q") == []
    assert [letter[0] for letter in await dead_letters(connection, "q")] == ["b"]


async def test_a_retry_waits_for_its_delay(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", retry_delay=600)
    await api.push("q", 1)
    begun = asyncio.get_running_loop().time()
    await api.ack(await api.pop("q"), "failed")
    assert payloads(await api.pop("q", wait=True, timeout=60_000)) == [1]
    assert asyncio.get_running_loop().time() - begun > 0.55


async def test_retry_gives_messages_back_at_once_and_costs_nothing(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", retry_limit=1, retry_delay=60_000)
    await api.push("q", 1, 2)
    for _ in range(5):
        messages = await api.pop("q", batch=2)
        assert payloads(messages) == [1, 2]
        await api.ack(messages, "retry")
    assert await dead_letters(connection, "q") == []


async def test_dlq_gives_up_on_a_message_at_once(api: Api, connection: Connection) -> None:
    await api.push("q", 1, 2, ids=["a", "b"])
    results = await api.ack(await api.pop("q", batch=2), ["dlq", "completed"], error="poison")
    assert [result["dlq"] for result in results] == [True, False]
    assert await dead_letters(connection, "q") == [("a", "poison", 0)]


async def test_a_single_ack_without_a_reason_leaves_the_reason_empty(api: Api, connection: Connection) -> None:
    await api.push("q", 1, 2, ids=["a", "b"])
    (message,) = await api.pop("q")
    body = {key: message[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": "dlq"}
    await api.call("POST", "/api/v1/ack", body)
    await api.ack(await api.pop("q"), "dlq")
    assert await dead_letters(connection, "q") == [("a", "", 0), ("b", "Retries exhausted", 0)]


async def test_a_renewed_lease_outlives_its_first_end(api: Api, connection: Connection) -> None:
    await make_queue(connection, "q", lease_time=2)
    await api.push("q", 1)
    messages = await api.pop("q")
    answer = await api.call("POST", f"/api/v1/lease/{messages[0]['leaseId']}/extend", {"seconds": 30})
    assert answer.status == 200
    assert answer.body["success"] is True
    assert datetime.fromisoformat(answer.body["expiresAt"]) > datetime.fromisoformat(messages[0]["createdAt"])
    assert await api.pop("q", wait=True, timeout=2500) == []
    assert all(result["success"] for result in await api.ack(messages))


async def test_renewing_never_shortens_a_lease(api: Api) -> None:
    await api.push("q", 1)
    (message,) = await api.pop("q")
    path = f"/api/v1/lease/{message['leaseId']}/extend"
    long = await api.call("POST", path, {"seconds": 1000})
    short = await api.call("POST", path, {"seconds": 1})
    assert short.body["expiresAt"] == long.body["expiresAt"]


async def test_a_lease_over_several_partitions_is_renewed_with_all_of_them(api: Api, connection: Connection) -> None:
    for partition in ("a", "b", "c"):
        await api.push("q", 1, partition=partition)
    messages = await api.pop("q", batch=3, partitions=3)
    await api.call("POST", f"/api/v1/lease/{messages[0]['leaseId']}/extend", {"seconds": 5000})
    rows = await connection.fetch("SELECT lease_until - clock_timestamp() AS left FROM queen.cursors")
    assert len(rows) == 3
    assert all(row["left"].total_seconds() > 4000 for row in rows)


@pytest.mark.parametrize("lease", ["019dd000-0000-7000-8000-000000000001", "nonsense", "%00", "x" * 300])
async def test_renewing_what_is_no_lease_is_answered_404(api: Api, lease: str) -> None:
    answer = await api.call("POST", f"/api/v1/lease/{lease}/extend")
    assert answer.status in (400, 404)
    assert answer.body["error"]


async def test_a_lease_that_ended_cannot_be_renewed(api: Api, connection: Connection) -> None:
    await api.push("q", 1)
    (message,) = await api.pop("q")
    await expire_leases(connection, "q")
    answer = await api.call("POST", f"/api/v1/lease/{message['leaseId']}/extend")
    assert (answer.status, answer.body) == (404, {"error": "Lease not found"})


async def test_acks_of_many_partitions_sent_at_once_are_each_applied(api: Api) -> None:
    for partition in range(40):
        await api.push("q", *range(5), partition=str(partition))
    batches = [await api.pop("q", str(partition), batch=5) for partition in range(40)]
    answers = await asyncio.gather(
        *(api.ack(messages, "completed" if number % 2 else "failed") for number, messages in enumerate(batches))
    )
    assert all(result["success"] for results in answers for result in results)
    left = await api.pop("q", batch=1000, partitions=1000, wait=True, timeout=60_000)
    while len(left) < 100:
        left += await api.pop("q", batch=1000, partitions=1000, wait=True, timeout=60_000)
    assert {int(message["partition"]) % 2 for message in left} == {0}


async def test_acks_below_the_cursor_say_so_and_failures_there_are_refused(api: Api) -> None:
    await api.push("q", 1, 2, 3, 4)
    messages = await api.pop("q", batch=4)
    (middle,) = await api.ack([messages[1]])
    assert middle["success"] and "noop" not in middle
    for again in (messages[0], messages[1]):
        (late,) = await api.ack([again])
        assert (late["success"], late["noop"]) == (True, True)
    for status in ("failed", "retry", "dlq"):
        (refused,) = await api.ack([messages[0]], status)
        assert (refused["success"], refused["error"]) == (False, ALREADY_COMMITTED)
    # The lease is as it was.
    assert all(result["success"] for result in await api.ack(messages[2:]))
    (repeated,) = await api.ack([messages[3]])
    assert (repeated["success"], repeated["noop"]) == (True, True)


async def test_a_failure_that_becomes_a_dead_letter_frees_the_messages_after_it(api: Api) -> None:
    await api.configure("q", retryLimit=0)
    await api.push("q", 1, 2, 3)
    messages = await api.pop("q", batch=3)
    (failed,) = await api.ack([messages[0]], "failed")
    assert (failed["dlq"], failed["leaseReleased"]) == (True, True)
    again = await api.pop("q", batch=3)
    assert payloads(again) == [2, 3]
    # One that is given up on by its consumer takes no others with it.
    (given_up,) = await api.ack([again[0]], "dlq")
    assert (given_up["dlq"], given_up["leaseReleased"]) == (True, False)
    assert (await api.ack([again[1]]))[0]["success"]


async def test_a_pop_may_say_how_long_its_lease_lasts(api: Api, connection: Connection) -> None:
    await api.configure("q", leaseTime=600)
    await api.push("q", 1, partition="a")
    await api.push("q", 1, partition="b")
    for partition in ("a", "b"):
        # A cursor that is new, and one that was there before.
        for seconds in (30, 90):
            messages = await api.pop("q", partition, leaseSeconds=seconds)
            left = await connection.fetchval(
                "SELECT extract(epoch FROM lease_until - lease_acquired_at)::float8 FROM queen.cursors c"
                " JOIN queen.partitions p ON p.id = c.partition_id WHERE p.name = $1",
                partition,
            )
            assert abs(left - seconds) < 1
            await api.ack(messages, "retry")
    (message,) = await api.pop("q", "a")
    extended = await api.call("POST", f"/api/v1/lease/{message['leaseId']}/extend", {"seconds": 700})
    assert (extended.body["success"], extended.body["renewed"]) == (True, 1)
