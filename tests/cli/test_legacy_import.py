"""Taking over the data of a Queen 0.15."""

from __future__ import annotations

import asyncio
import base64
import os
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from queen.cli.tools import legacy_import
from queen.embedded import EmbeddedPostgres
from tests.cli.conftest import Cli, new_database, serving

KEY = bytes(range(32))
START = datetime(2026, 1, 2, 3, 4, 5, 123456, tzinfo=UTC)

# The tables of 0.15 as far as they are read.
SCHEMA = """
CREATE SCHEMA queen;
CREATE TABLE queen.queues (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), name varchar(255) UNIQUE, namespace varchar(255), task varchar(255),
    priority int DEFAULT 0, lease_time int DEFAULT 300, retry_limit int DEFAULT 3, retry_delay int DEFAULT 1000,
    max_queue_size int DEFAULT 0, ttl int DEFAULT 3600, dead_letter_queue bool DEFAULT false,
    dlq_after_max_retries bool DEFAULT false, delayed_processing int DEFAULT 0, window_buffer int DEFAULT 0,
    retention_seconds int DEFAULT 0, completed_retention_seconds int DEFAULT 0, retention_enabled bool DEFAULT false,
    encryption_enabled bool DEFAULT false, max_wait_time_seconds int DEFAULT 0, created_at timestamptz DEFAULT now()
);
CREATE TABLE queen.partitions (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), queue_id uuid REFERENCES queen.queues, name varchar(255),
    created_at timestamptz DEFAULT now(), UNIQUE (queue_id, name)
);
CREATE TABLE queen.messages (
    id uuid PRIMARY KEY, transaction_id varchar(255) NOT NULL, trace_id uuid,
    partition_id uuid REFERENCES queen.partitions, payload jsonb NOT NULL, created_at timestamptz DEFAULT now(),
    is_encrypted bool DEFAULT false, producer_sub text,
    UNIQUE (partition_id, transaction_id)
);
CREATE TABLE queen.partition_consumers (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), partition_id uuid, consumer_group varchar(255),
    last_consumed_id uuid DEFAULT '00000000-0000-0000-0000-000000000000', last_consumed_created_at timestamptz,
    total_messages_consumed bigint DEFAULT 0, total_batches_consumed bigint DEFAULT 0, last_consumed_at timestamptz,
    batch_retry_count int DEFAULT 0, created_at timestamptz DEFAULT now()
);
CREATE TABLE queen.consumer_groups_metadata (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), consumer_group text, queue_name text DEFAULT '',
    partition_name text DEFAULT '', namespace text DEFAULT '', task text DEFAULT '', subscription_mode text,
    subscription_timestamp timestamptz, created_at timestamptz DEFAULT now()
);
CREATE TABLE queen.dead_letter_queue (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), message_id uuid, partition_id uuid, consumer_group varchar(255),
    error_message text, retry_count int, original_created_at timestamptz, failed_at timestamptz DEFAULT now()
);
CREATE TABLE queen.message_traces (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), message_id uuid, partition_id uuid, transaction_id varchar(255),
    consumer_group varchar(255), event_type varchar(100), data jsonb, created_at timestamptz DEFAULT now(),
    worker_id text
);
CREATE TABLE queen.message_trace_names (trace_id uuid, trace_name text, PRIMARY KEY (trace_id, trace_name));
"""


class Old:
    """The database of a Queen 0.15."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def run(self, text: str, *values: Any) -> Any:
        async def work() -> Any:
            connection = await asyncpg.connect(self.dsn)
            try:
                return await connection.fetchval(text, *values)
            finally:
                await connection.close()

        return asyncio.run(work())

    def queue(self, name: str, **options: Any) -> uuid.UUID:
        columns = ["name", *options]
        places = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
        text = f"INSERT INTO queen.queues ({', '.join(columns)}) VALUES ({places}) RETURNING id"
        found: uuid.UUID = self.run(text, name, *options.values())
        return found

    def partition(self, queue: uuid.UUID, name: str) -> uuid.UUID:
        found: uuid.UUID = self.run(
            "INSERT INTO queen.partitions (queue_id, name) VALUES ($1, $2) RETURNING id", queue, name
        )
        return found

    def message(
        self, partition: uuid.UUID, number: int, payload: Any, *, id: uuid.UUID | None = None, **columns: Any
    ) -> uuid.UUID:
        found = id or uuid.UUID(int=(number << 64) | uuid.uuid4().int >> 64)
        values = {
            "id": found,
            "partition_id": partition,
            "transaction_id": f"t-{number}",
            "payload": msgspec.json.encode(payload).decode(),
            # Two and two share a time, as messages of one transaction do.
            "created_at": START + timedelta(seconds=number // 2),
            **columns,
        }
        places = ", ".join(f"${index}" for index in range(1, len(values) + 1))
        self.run(f"INSERT INTO queen.messages ({', '.join(values)}) VALUES ({places})", *values.values())
        return found


@pytest.fixture
def old(postgres: EmbeddedPostgres) -> Old:
    dsn = asyncio.run(new_database(postgres, template=None))

    async def make() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(SCHEMA)
        await connection.close()

    asyncio.run(make())
    return Old(dsn)


@pytest.fixture
def target(postgres: EmbeddedPostgres) -> str:
    return asyncio.run(new_database(postgres, template=None))


def encrypted(payload: Any) -> dict[str, str]:
    """As 0.15 stored it: of 16 bytes of IV the first 12 are used."""
    iv = os.urandom(16)
    sealed = AESGCM(KEY).encrypt(iv[:12], msgspec.json.encode(payload), None)
    parts = {"encrypted": sealed[:-16], "iv": iv, "authTag": sealed[-16:]}
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


def test_everything_of_a_queue_is_taken_over(
    no_server: Cli, old: Old, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEEN_ENCRYPTION_KEY", KEY.hex())
    orders = old.queue("orders", namespace="billing", task="ingest", lease_time=60, retry_limit=0, max_queue_size=99)
    secret = old.queue("secret", encryption_enabled=True)
    first, second = old.partition(orders, "Default"), old.partition(orders, "eu")
    trace = uuid.uuid4()
    ids = [old.message(first, number, {"n": number}, producer_sub="ada", trace_id=trace) for number in range(7)]
    # Ids that follow each other share a segment; a group stands in the middle of one.
    row = uuid.UUID("01900000-0000-7000-8000-000000000010")
    for number in range(4):
        old.message(second, number, number, id=uuid.UUID(int=row.int + number), created_at=START)
    sealed = old.message(old.partition(secret, "Default"), 1, encrypted({"card": 1}), is_encrypted=True)
    consumer = (
        "INSERT INTO queen.partition_consumers (partition_id, consumer_group, last_consumed_created_at,"
        " last_consumed_id, total_messages_consumed) VALUES ($1, $2, $3, $4, 3)"
    )
    old.run(consumer, first, "workers", START + timedelta(seconds=1), ids[2])
    old.run(consumer, second, "workers", START, uuid.UUID(int=row.int + 1))
    old.run("INSERT INTO queen.partition_consumers (partition_id, consumer_group) VALUES ($1, 'idle')", first)
    old.run("INSERT INTO queen.partition_consumers (partition_id, consumer_group) VALUES ($1, 'late')", first)
    old.run(
        "INSERT INTO queen.consumer_groups_metadata (consumer_group, queue_name, subscription_mode,"
        " subscription_timestamp) VALUES ('late', 'orders', 'timestamp', $1)",
        START + timedelta(seconds=2),
    )
    old.run(
        "INSERT INTO queen.dead_letter_queue (message_id, partition_id, consumer_group, error_message, retry_count,"
        " original_created_at, failed_at) VALUES ($1, $2, 'workers', 'boom', 2, $3, $3)",
        ids[1],
        first,
        START,
    )
    noted = old.run(
        "INSERT INTO queen.message_traces (message_id, partition_id, transaction_id, consumer_group, event_type, data)"
        " VALUES ($1, $2, 't-3', 'workers', 'step', '{\"at\": 1}') RETURNING id",
        ids[3],
        first,
    )
    old.run("INSERT INTO queen.message_trace_names VALUES ($1, 'order-3')", noted)

    take = ("import", "--from", old.dsn, "--database-url", target, "--verify", "--batch", 2)
    ran = no_server(*take)
    assert ran.code == 0, ran.err
    assert ran.json[0] == {
        "queue": "orders",
        "partitions": 2,
        "messages": 11,
        "new": 11,
        "groups": 3,
        "deadLetters": 1,
        "traces": 1,
        "verified": True,
    }
    # While the old server went on.
    later = old.message(first, 8, {"n": 8}, created_at=datetime.now(UTC) - timedelta(seconds=5))
    old.run(
        "UPDATE queen.partition_consumers SET last_consumed_id = $1, last_consumed_created_at = $2"
        " WHERE consumer_group = 'workers' AND partition_id = $3",
        ids[3],
        START + timedelta(seconds=1),
        first,
    )
    again = no_server(*take).json
    assert [(row["new"], row["messages"], row["verified"]) for row in again] == [(1, 12, True), (0, 1, True)]

    with serving(target, tmp_path, queen_encryption_key=(KEY.hex(),)) as server:
        monkeypatch.setenv("QUEEN_SERVER", server.url)
        options = no_server("queue", "describe", "orders").json
        assert (options["namespace"], options["task"]) == ("billing", "ingest")
        assert [options["options"][name] for name in ("leaseTime", "retryLimit", "maxSize", "ttl")] == [60, 0, 99, None]
        messages = no_server("queue", "export", "orders", "--partition", "Default").lines
        assert [uuid.UUID(one["id"]) for one in messages] == [*ids, later]
        assert [one["transactionId"] for one in messages] == [f"t-{number}" for number in (*range(7), 8)]
        assert messages[3]["createdAt"] == "2026-01-02T03:04:06.123456Z"
        assert (messages[0]["producerSub"], messages[0]["traceId"]) == ("ada", str(trace))

        def taken(*arguments: object) -> list[Any]:
            return [one["data"] for one in no_server("pop", *arguments, "-n", 50, "--no-wait").lines]

        assert taken("orders", "--partition", "Default", "--cg", "workers") == [
            {"n": number} for number in (4, 5, 6, 8)
        ]
        assert taken("orders", "--partition", "eu", "--cg", "workers") == [2, 3]
        assert len(taken("orders", "--partition", "Default", "--cg", "idle")) == 8
        assert taken("orders", "--partition", "Default", "--cg", "late") == [{"n": 6}, {"n": 8}]
        assert taken("secret") == [{"card": 1}]
        (letter,) = no_server("dlq", "list", "--queue", "orders").json
        assert (letter["id"], letter["data"], letter["errorMessage"]) == (str(ids[1]), {"n": 1}, "boom")
        (found,) = no_server("trace", "by-name", "order-3").json
        assert (found["transaction_id"], found["data"], found["id"]) == ("t-3", {"at": 1}, str(noted))
        # What was stored a moment ago is remembered here as it was there.
        pushed = no_server("push", "orders", "--data", "1", "--transaction-id", "t-8", "-o", "json").json
        assert pushed == {"queued": 0, "duplicate": 1, "failed": 0}
        assert uuid.UUID(no_server("queue", "export", "secret").lines[0]["id"]) == sealed


def test_an_import_that_was_interrupted_goes_on(
    no_server: Cli, old: Old, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = old.partition(old.queue("orders"), "Default")
    for number in range(9):
        old.message(partition, number, number)
    stored = legacy_import.Importer._store
    calls = []

    async def failing(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ConnectionResetError("the network is gone")
        await stored(self, *arguments)

    monkeypatch.setattr(legacy_import.Importer, "_store", failing)
    take = ("import", "--from", old.dsn, "--database-url", target, "--batch", 2, "--verify")
    broken = no_server(*take)
    assert (broken.code, broken.out) == (2, "")
    assert broken.err.startswith("queen: the network is gone; try again")
    (row,) = no_server(*take).json
    assert (row["messages"], row["new"], row["verified"]) == (9, 5, True)


def test_a_difference_is_found(no_server: Cli, old: Old, target: str) -> None:
    partition = old.partition(old.queue("orders"), "Default")
    for number in range(3):
        old.message(partition, number, number)
    take = ("import", "--from", old.dsn, "--database-url", target, "--verify")
    assert no_server(*take).code == 0
    old.run("UPDATE queen.messages SET payload = '9' WHERE transaction_id = 't-1'")
    ran = no_server(*take)
    assert ran.code == 2
    assert "both sides differ on orders" in ran.err


def test_what_the_old_server_has_removed_since_is_no_difference(no_server: Cli, old: Old, target: str) -> None:
    partition = old.partition(old.queue("orders"), "Default")
    for number in range(6):
        old.message(partition, number, number)
    take = ("import", "--from", old.dsn, "--database-url", target, "--verify", "--batch", 2)
    assert no_server(*take).code == 0
    # Its retention removes the oldest, and somebody deletes one in the middle.
    old.run("DELETE FROM queen.messages WHERE transaction_id IN ('t-0', 't-1', 't-3')")
    old.message(partition, 6, 6)
    ran = no_server(*take)
    assert ran.code == 0, ran.err
    (row,) = ran.json
    assert (row["messages"], row["new"], row["verified"]) == (7, 1, True)
    # But one that is there and not here is, and so is one that was changed.
    old.message(partition, 7, 7, created_at=START, id=uuid.UUID(int=1))
    assert no_server(*take).code == 2


def test_what_cannot_be_taken_over_is_refused(
    no_server: Cli, old: Old, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUEEN_ENCRYPTION_KEY", raising=False)
    place = ("--database-url", target)
    assert "is not that of a Queen 0.15" in no_server("import", "--from", target, *place).err
    assert no_server("import", "--from", "postgresql://x@127.0.0.1:1/x", *place).code == 1
    assert "has no queue nothing" in no_server("import", "--from", old.dsn, *place, "--queue", "nothing").err
    old.message(old.partition(old.queue("secret"), "Default"), 1, encrypted(1), is_encrypted=True)
    assert "encrypted by a key" in no_server("import", "--from", old.dsn, *place).err


def test_what_an_open_transaction_may_still_store_is_left_for_the_next_run(
    no_server: Cli, old: Old, target: str
) -> None:
    partition = old.partition(old.queue("orders"), "Default")
    old.message(partition, 1, 1)
    take = ("import", "--from", old.dsn, "--database-url", target)

    async def around() -> Any:
        """A producer began before another stored something, and stores its message after the import has looked."""
        slow = await asyncpg.connect(old.dsn)
        try:
            async with slow.transaction():
                began = await slow.fetchval("SELECT now()")
                await asyncio.to_thread(old.message, partition, 3, 3, created_at=began + timedelta(milliseconds=1))
                (row,) = (await asyncio.to_thread(no_server, *take)).json
                assert row["new"] == 1
                await slow.execute(
                    "INSERT INTO queen.messages (id, partition_id, transaction_id, payload)"
                    " VALUES ($1, $2, 't-2', '2')",
                    uuid.uuid4(),
                    partition,
                )
        finally:
            await slow.close()

    asyncio.run(around())
    (row,) = no_server(*take, "--verify").json
    assert (row["messages"], row["new"], row["verified"]) == (3, 2, True)
