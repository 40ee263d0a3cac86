"""Messages of encrypted queues: sealed in the database, readable with the right key, never lost for want of one."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.conftest import StartServer
from tests.support.ageing import Connection
from tests.support.api import Answer, Api

KEY, NEW_KEY = "0f" * 32, "e1" * 32
SECRET = {"card": "4111-1111-1111-1111"}


async def test_payloads_are_sealed_in_the_database_and_open_in_a_pop(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server(queen_encryption_key=KEY)
    assert (await api.configure("vault", encryptionEnabled=True))["options"]["encryptionEnabled"] is True
    await api.push("vault", SECRET, SECRET)
    await api.push("open", SECRET)
    assert await bodies_with_the_secret(connection) == ["open"]
    assert [message["data"] for message in await api.pop("vault")] == [SECRET]
    # A server that has nothing in memory reads what is stored.
    other = await start_server(queen_encryption_key=KEY)
    assert [message["data"] for message in await other.pop("vault", batch=2, consumerGroup="g")] == [SECRET, SECRET]


async def test_a_large_payload_is_sealed_too(start_server: StartServer) -> None:
    api = await start_server(queen_encryption_key=KEY, segment_cache_mb=0)
    await api.configure("vault", encryptionEnabled=True)
    large = ["many words"] * 20_000
    await api.push("vault", large)
    assert [message["data"] for message in await api.pop("vault")] == [large]


async def test_dead_letters_are_sealed_as_well(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True, retryLimit=0)
    await api.push("vault", SECRET)
    assert (await api.ack(await api.pop("vault"), "failed"))[0]["dlq"]
    body: bytes = await connection.fetchval("SELECT body FROM queen.dead_letters")
    assert b"4111" not in body


async def test_without_a_key_a_push_is_refused_and_nothing_is_stored(api: Api, connection: Connection) -> None:
    await api.configure("vault", encryptionEnabled=True)
    answer = await push(api, "vault")
    assert answer.status == 409
    assert "QUEEN_ENCRYPTION_KEY" in answer.body["error"]
    mixed = [{"queue": "open", "payload": 1}, {"queue": "vault", "payload": 2}]
    assert (await api.call("POST", "/api/v1/push", {"items": mixed})).status == 409
    assert await connection.fetchval("SELECT count(*) FROM queen.segments") == 0


async def test_without_a_key_a_transaction_is_refused_and_nothing_is_stored(api: Api, connection: Connection) -> None:
    await api.configure("vault", encryptionEnabled=True)
    items = [{"queue": "open", "payload": 1}, {"queue": "vault", "payload": 2}]
    answer = await api.call("POST", "/api/v1/transaction", {"operations": [{"type": "push", "items": items}]})
    assert answer.status == 409
    assert "QUEEN_ENCRYPTION_KEY" in answer.body["error"]
    assert await connection.fetchval("SELECT count(*) FROM queen.segments") == 0


async def test_a_refused_push_does_not_fail_those_beside_it(api: Api) -> None:
    await api.configure("vault", encryptionEnabled=True)
    answers = await asyncio.gather(*(push(api, queue) for queue in ("open", "vault") * 20))
    assert [answer.status for answer in answers] == [201, 409] * 20
    assert len(await api.pop("open", batch=100)) == 20


async def test_after_a_change_of_keys_the_old_one_still_opens(start_server: StartServer) -> None:
    before = await start_server(queen_encryption_key=KEY)
    await before.configure("vault", encryptionEnabled=True)
    await before.push("vault", "old")
    after = await start_server(queen_encryption_key=f"{NEW_KEY},{KEY}")
    await after.push("vault", "new")
    assert [message["data"] for message in await after.pop("vault", batch=2)] == ["old", "new"]
    # What was pushed after the change needs the new key.
    unaware = await start_server(queen_encryption_key=KEY)
    assert (await pop(unaware, "vault", batch=1, consumerGroup="g")).status == 200
    assert (await pop(unaware, "vault", batch=2, consumerGroup="h")).status == 409


async def test_a_pop_without_the_right_key_says_so_and_loses_nothing(start_server: StartServer) -> None:
    writer = await start_server(queen_encryption_key=KEY)
    await writer.configure("vault", encryptionEnabled=True)
    await writer.push("vault", 1, 2, 3)
    for keys in ("", NEW_KEY):
        reader = await start_server(queen_encryption_key=keys)
        for options in ({}, {"autoAck": True}, {"wait": True, "timeout": 5000}, {"autoAck": True, "wait": True}):
            answer = await pop(reader, "vault", batch=2, **options)
            assert answer.status == 409, options
            assert "vault" in answer.body["error"]
            assert "QUEEN_ENCRYPTION_KEY" in answer.body["error"]
    assert [message["data"] for message in await writer.pop("vault", batch=5)] == [1, 2, 3]


async def test_several_readers_without_the_key_pass_over_nothing(start_server: StartServer) -> None:
    """They take and give back the same messages at the same time, over and over."""
    writer = await start_server(queen_encryption_key=KEY)
    await writer.configure("vault", encryptionEnabled=True)
    for number in range(5):
        await writer.push("vault", number)
    readers = [await start_server() for _ in range(3)]

    async def read(api: Api) -> None:
        for _ in range(15):
            # By name, because that looks at PostgreSQL at once, every time.
            answer = await api.call("GET", "/api/v1/pop/queue/vault/partition/Default", autoAck=True)
            assert answer.status in (204, 409)

    await asyncio.gather(*(read(api) for api in readers))
    assert [message["data"] for message in await writer.pop("vault", batch=9, autoAck=True)] == [0, 1, 2, 3, 4]


async def test_what_can_be_read_is_delivered_beside_what_cannot(start_server: StartServer) -> None:
    writer = await start_server(queen_encryption_key=KEY)
    await writer.configure("vault", encryptionEnabled=True)
    await writer.push("vault", "sealed", partition="a")
    reader = await start_server(queen_encryption_key=NEW_KEY)
    await reader.push("vault", "readable", partition="b")
    answers = [await pop(reader, "vault", wait=True, timeout=2000, autoAck=True) for _ in range(2)]
    assert sorted(answer.status for answer in answers) == [200, 409]


async def test_messages_stored_before_encryption_was_turned_on_or_off_stay_readable(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server(queen_encryption_key=KEY, segment_cache_mb=0)
    for enabled in (False, True, False):
        await api.configure("vault", encryptionEnabled=enabled)
        await api.push("vault", SECRET)
    assert await bodies_with_the_secret(connection) == ["vault", "vault"]
    assert [message["data"] for message in await api.pop("vault", batch=3)] == [SECRET] * 3


async def test_a_message_that_was_tampered_with_is_not_delivered(
    start_server: StartServer, connection: Connection
) -> None:
    api = await start_server(queen_encryption_key=KEY, segment_cache_mb=0)
    await api.configure("vault", encryptionEnabled=True)
    await api.push("vault", SECRET)
    await connection.execute(
        "UPDATE queen.segments SET body = set_byte(body, length(body) - 1, 255 - get_byte(body, length(body) - 1))"
    )
    answer = await pop(api, "vault")
    assert answer.status == 409
    assert "altered" in answer.body["error"]


async def test_a_duplicate_is_recognised_even_if_the_first_cannot_be_read(start_server: StartServer) -> None:
    before = await start_server(queen_encryption_key=KEY)
    await before.configure("vault", encryptionEnabled=True)
    (first,) = await before.push("vault", 1, ids=["t"])
    after = await start_server(queen_encryption_key=NEW_KEY)
    (again,) = await after.push("vault", 1, ids=["t"])
    assert (again["status"], again["message_id"]) == ("duplicate", first["message_id"])


async def test_an_ack_that_cannot_make_a_dead_letter_fails_alone(start_server: StartServer) -> None:
    """A dead letter is a copy, and what cannot be read cannot be copied."""
    writer = await start_server(queen_encryption_key=KEY)
    await writer.configure("vault", encryptionEnabled=True)
    await writer.push("vault", 1)
    (sealed,) = await writer.pop("vault")
    reader = await start_server()
    await reader.push("open", 2)
    (message,) = await reader.pop("open")
    refused, results = await asyncio.gather(
        reader.call("POST", "/api/v1/ack", {**address(sealed), "status": "dlq"}), reader.ack([message])
    )
    assert refused.status == 409
    assert results[0]["success"]


def address(message: dict[str, Any]) -> dict[str, Any]:
    return {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}


async def push(api: Api, queue: str) -> Answer:
    return await api.call("POST", "/api/v1/push", {"items": [{"queue": queue, "payload": SECRET}]})


async def pop(api: Api, queue: str, **query: Any) -> Answer:
    return await api.call("GET", f"/api/v1/pop/queue/{queue}", **query)


async def bodies_with_the_secret(connection: Connection) -> list[str]:
    """The queues of the segments in which the payload can be read."""
    rows = await connection.fetch(
        "SELECT q.name FROM queen.segments s JOIN queen.partitions p ON p.id = s.partition_id"
        " JOIN queen.queues q ON q.id = p.queue_id WHERE position('4111-1111'::bytea IN s.body) > 0"
    )
    return [row["name"] for row in rows]
