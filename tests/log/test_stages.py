"""Staged publishing: a batch becomes messages all at once, and once, whatever is tried how often."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.api import Answer, Api
from tests.support.database import Connection, stored_ids, stored_messages
from tests.support.topic_api import TopicApi, item, values

KEY = "0f" * 32
RUN = "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11"


class Writer:
    """Writes batches of a run through the API."""

    def __init__(self, api: Api, run: str = RUN) -> None:
        self.api = api
        self.run = run

    async def stage(
        self, batch: int, items: Sequence[dict[str, Any]], attempt: str | None = None, piece: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Stage items; returns what a publish says of the attempt."""
        attempt = attempt or str(uuid.uuid4())
        body = {"run": self.run, "batch": batch, "attempt": attempt, "piece": piece, "items": list(items)} | more
        answer = await self.api.call("POST", "/api/v1/stages", body)
        assert answer.status == 201, answer
        return {"attempt": attempt, "messages": answer.body["staged"]}

    async def try_publish(self, batch: int, *attempts: dict[str, Any]) -> Answer:
        body = {"run": self.run, "batch": batch, "attempts": list(attempts)}
        return await self.api.call("POST", "/api/v1/stages/publish", body)

    async def publish(self, batch: int, *attempts: dict[str, Any]) -> tuple[int, int, bool]:
        """Publish; returns messages, duplicates, and whether it was a repetition."""
        answer = await self.try_publish(batch, *attempts)
        assert answer.status == 200, answer
        return answer.body["messages"], answer.body["duplicates"], answer.body["repeated"]


def messages(queue: str, *payloads: Any, partition: str = "Default", ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [{"queue": queue, "partition": partition, "payload": one} for one in payloads]
    for one, id in zip(made, ids, strict=False):
        one["transactionId"] = id
    return made


@pytest.fixture
def writer(api: Api) -> Writer:
    return Writer(api)


async def payloads(connection: Connection, queue: str, partition: str = "Default") -> list[str]:
    return [message.payload.decode() for message in await stored_messages(connection, queue, partition)]


async def staged(connection: Connection) -> int:
    count: int = await connection.fetchval("SELECT coalesce(sum(count), 0) FROM queen.stages")
    return count


async def test_nothing_is_seen_before_it_is_published_and_everything_afterwards(
    writer: Writer, connection: Connection
) -> None:
    one = await writer.stage(0, [*messages("q", 1, 2, partition="a"), *messages("q", 3, partition="b")])
    two = await writer.stage(0, messages("q", 4, 5, partition="a"))
    assert await writer.api.pop("q") == []
    assert await writer.publish(0, one, two) == (5, 0, False)
    assert await payloads(connection, "q", "a") == ["1", "2", "4", "5"]
    assert await payloads(connection, "q", "b") == ["3"]
    assert await staged(connection) == 0


async def test_a_batch_that_is_published_again_stays_published_once(writer: Writer, connection: Connection) -> None:
    one = await writer.stage(3, messages("q", 1, 2))
    assert await writer.publish(3, one) == (2, 0, False)
    assert await writer.publish(3, one) == (2, 0, True)
    # A driver that died before it could note the end writes the batch anew, cut in another way.
    again = [await writer.stage(3, messages("q", payload)) for payload in (1, 2)]
    assert await writer.publish(3, *again) == (2, 0, True)
    assert await writer.publish(2, one) == (0, 0, True)
    assert await writer.publish(4, await writer.stage(4, messages("q", 3))) == (1, 0, False)
    assert await payloads(connection, "q") == ["1", "2", "3"]
    assert await staged(connection) == 0


async def test_attempts_that_are_not_named_leave_nothing(writer: Writer, connection: Connection) -> None:
    await writer.stage(0, messages("q", "failed"))
    good = await writer.stage(0, messages("q", "good"))
    await writer.stage(0, messages("q", "speculative"))
    await writer.publish(0, good)
    assert await payloads(connection, "q") == ['"good"']
    assert await staged(connection) == 0


async def test_a_piece_that_is_sent_again_counts_once(writer: Writer, connection: Connection) -> None:
    attempt = str(uuid.uuid4())
    for piece, payload in ((0, "a"), (1, "b"), (1, "b"), (0, "a")):
        await writer.stage(0, messages("q", payload), attempt, piece)
    assert await writer.publish(0, {"attempt": attempt, "messages": 2}) == (2, 0, False)
    assert await payloads(connection, "q") == ['"a"', '"b"']


async def test_what_is_missing_refuses_the_whole_batch(writer: Writer, connection: Connection) -> None:
    """As when PostgreSQL has crashed, which empties the table of what is staged."""
    one, two = await writer.stage(0, messages("q", 1)), await writer.stage(0, messages("q", 2))
    await connection.execute("DELETE FROM queen.stages WHERE attempt = $1", uuid.UUID(two["attempt"]))
    answer = await writer.try_publish(0, one, two)
    assert answer.status == 409
    assert "write the batch again" in answer.body["error"]
    assert await payloads(connection, "q") == []
    # It is not taken for published.
    assert await writer.publish(0, one, await writer.stage(0, messages("q", 2))) == (2, 0, False)


async def test_an_abandoned_batch_leaves_nothing(writer: Writer, connection: Connection) -> None:
    await writer.stage(0, messages("q", 1, 2))
    kept = await writer.stage(1, messages("q", 3))
    answer = await writer.api.call("POST", "/api/v1/stages/abandon", {"run": RUN, "batch": 0})
    assert answer.body == {"removed": 2}
    assert await writer.publish(1, kept) == (1, 0, False)
    assert await payloads(connection, "q") == ["3"]


async def test_transaction_ids_inside_the_window_are_stored_once(writer: Writer, connection: Connection) -> None:
    await writer.api.push("q", "pushed", ids=["a"])
    one = await writer.stage(0, messages("q", 1, 2, 3, ids=["a", "b", "b"]))
    two = await writer.stage(0, [*messages("q", 4, 5, ids=["b", "c"]), *messages("q", 6)])
    assert await writer.publish(0, one, two) == (3, 3, False)
    assert await payloads(connection, "q") == ['"pushed"', "2", "5", "6"]
    # Pushes know of it too, and the next batch.
    assert [one["status"] for one in await writer.api.push("q", 7, 8, ids=["b", "d"])] == ["duplicate", "queued"]
    assert await writer.publish(1, await writer.stage(1, messages("q", 9, 10, ids=["d", "e"]))) == (1, 1, False)
    assert await payloads(connection, "q") == ['"pushed"', "2", "5", "6", "8", "10"]


async def test_where_a_queue_allows_duplicates_so_does_publishing(writer: Writer, connection: Connection) -> None:
    await writer.api.configure("q", dedupWindowSeconds=0)
    assert await writer.publish(0, await writer.stage(0, messages("q", 1, 2, ids=["a", "a"]))) == (2, 0, False)
    assert await payloads(connection, "q") == ["1", "2"]


async def test_a_queue_that_was_deleted_meanwhile_is_created_again(writer: Writer, connection: Connection) -> None:
    one = await writer.stage(0, messages("q", *range(60)))
    two = await writer.stage(0, messages("q", 60, ids=["given"]))
    assert (await writer.api.call("DELETE", "/api/v1/resources/queues/q")).status == 200
    assert await writer.publish(0, one, two) == (61, 0, False)
    assert await payloads(connection, "q") == [str(number) for number in range(61)]
    # The ids are found again: they were hashed for the new partition.
    assert [one["status"] for one in await writer.api.push("q", 0, ids=["given"])] == ["duplicate"]


async def test_what_does_not_fit_a_queue_refuses_the_whole_batch(writer: Writer, connection: Connection) -> None:
    await writer.api.configure("small", maxSize=3)
    one = await writer.stage(0, [*messages("small", 1, 2, 3, 4), *messages("q", 5)])
    answer = await writer.try_publish(0, one)
    assert answer.status == 409
    assert "max capacity (3)" in answer.body["error"]
    assert await payloads(connection, "small") == await payloads(connection, "q") == []
    await writer.api.configure("small", maxSize=4)
    assert await writer.publish(0, one) == (5, 0, False)


async def test_an_encrypted_queue_gets_nothing_in_clear(start_server: StartServer, connection: Connection) -> None:
    api = await start_server(queen_encryption_key=KEY, segment_cache_mb=0)
    writer = Writer(api)
    await api.configure("vault", encryptionEnabled=True)
    before = await writer.stage(0, messages("vault", "secret 1"))
    # Between staging and publishing, the other queue becomes encrypted.
    other = await writer.stage(0, messages("later", "secret 2"))
    await api.configure("later", encryptionEnabled=True)
    assert await writer.publish(0, before, other) == (2, 0, False)
    assert await connection.fetchval("SELECT bool_and(get_byte(body, 0) >= 128) FROM queen.segments")
    assert [message["data"] for message in await api.pop("vault")] == ["secret 1"]
    assert [message["data"] for message in await api.pop("later")] == ["secret 2"]


async def test_an_encrypted_queue_without_a_key_is_refused(writer: Writer) -> None:
    await writer.api.configure("vault", encryptionEnabled=True)
    body = {"run": RUN, "batch": 0, "attempt": str(uuid.uuid4()), "items": messages("vault", 1)}
    answer = await writer.api.call("POST", "/api/v1/stages", body)
    assert answer.status == 409 and "QUEEN_ENCRYPTION_KEY" in answer.body["error"]


async def test_push_maintenance_holds_for_publishing_too(writer: Writer, connection: Connection) -> None:
    one = await writer.stage(0, messages("q", 1))
    await writer.api.call("POST", "/api/v1/system/maintenance", {"enabled": True})
    answer = await writer.try_publish(0, one)
    assert answer.status == 409 and "maintenance" in answer.body["error"]
    await writer.api.call("POST", "/api/v1/system/maintenance", {"enabled": False})
    assert await writer.publish(0, one) == (1, 0, False)


async def test_segments_are_of_bounded_size_and_ids_ascend(writer: Writer, connection: Connection) -> None:
    attempts = [await writer.stage(0, messages("q", *["x" * 500] * 700)) for _ in range(4)]
    assert await writer.publish(0, *reversed(attempts)) == (2800, 0, False)
    sizes = await connection.fetch("SELECT count, octet_length(body) AS nbytes FROM queen.segments")
    assert all(row["count"] <= 1024 for row in sizes) and len(sizes) >= 4
    ids = [message.id for message in await stored_messages(connection, "q")]
    assert ids == sorted(ids) and len(set(ids)) == 2800


async def test_a_parked_pop_is_woken(writer: Writer) -> None:
    one = await writer.stage(0, messages("q", 1))
    waiting = asyncio.create_task(writer.api.pop("q", wait=True, timeout=60_000))
    await asyncio.sleep(0)
    await writer.publish(0, one)
    assert [message["data"] for message in await waiting] == [1]


async def test_messages_are_acked_by_their_ids_like_any_others(writer: Writer) -> None:
    await writer.publish(0, await writer.stage(0, messages("q", *range(100))))
    popped = await writer.api.pop("q", batch=100)
    assert [message["data"] for message in popped] == list(range(100))
    assert all(result["success"] for result in await writer.api.ack(popped))


async def test_items_of_topics_are_published_with_all_they_have(writer: Writer, connection: Connection) -> None:
    topics = TopicApi(writer.api)
    await topics.enqueue(item("first", idempotency_key="k"))
    later = "2100-01-01T00:00:00Z"
    one = await writer.stage(0, [], topicItems=[item("low", priority=5), item("again", idempotency_key="k")])
    two = await writer.stage(
        0, [], topicItems=[item("high", priority=-1, metadata={"a": 1}), item("later", deliver_after=later)]
    )
    assert values(await topics.dequeue()) == ["first"]
    assert await writer.publish(0, one, two) == (3, 1, False)
    assert await writer.publish(0, one, two) == (3, 1, True)
    items = await topics.dequeue()
    assert values(items) == ["high", "low"]
    assert items[0]["metadata"] == {"a": 1}
    rows = await connection.fetch("SELECT deliver_after FROM queen.topic_items ORDER BY deliver_after DESC LIMIT 1")
    assert rows[0]["deliver_after"].year == 2100


async def test_a_quota_refuses_the_whole_batch(writer: Writer) -> None:
    topics = TopicApi(writer.api)
    await topics.call("PUT", "/quotas", {"namespace": "ns", "per_minute": 2})
    one = await writer.stage(0, [], topicItems=[item(number) for number in range(3)])
    answer = await writer.try_publish(0, one)
    assert answer.status == 400 and "2 items per minute" in answer.body["error"]
    await topics.call("PUT", "/quotas", {"namespace": "ns", "per_minute": 1000})
    assert await writer.publish(0, one) == (3, 0, False)


async def test_orphans_are_removed_after_a_day(writer: Writer, connection: Connection) -> None:
    assert writer.api.worker is not None
    await writer.stage(0, messages("q", 1))
    fresh = await writer.stage(1, messages("q", 2))
    await connection.execute("UPDATE queen.stages SET staged_at = now() - interval '25 hours' WHERE batch = 0")
    await writer.api.worker.broker.jobs.run_once()
    assert await staged(connection) == 1
    await writer.publish(1, fresh)
    assert await payloads(connection, "q") == ["2"]


async def test_a_batch_that_two_publish_at_the_same_time_is_published_once(
    start_server: StartServer, connection: Connection
) -> None:
    here, there = Writer(await start_server()), Writer(await start_server())
    for batch in range(5):
        one = await here.stage(batch, messages("q", *range(200)))
        answers = await asyncio.gather(here.publish(batch, one), there.publish(batch, one))
        assert sorted(repeated for _, _, repeated in answers) == [False, True]
    assert len(await stored_ids(connection, "q")) == 1000
