"""The hot statements find what they need by index, at 10 000 partitions and 1 000 000 messages as on the first day."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec
import pytest

from queen.embedded import EmbeddedPostgres
from queen.storage.database import Database
from tests.support.database import Connection
from tests.support.databases import TEMPLATE

ROWS = 16
# A statement about 16 rows, in tables of hundreds of thousands.
MOST_PAGES = 2000
SIZE = "the size of the page"
TABLES = {"partitions", "segments", "cursors", "topic_items", "topic_heads", "topic_keys", "topic_key_claims"}
LEASE = uuid.UUID("019dd000-0000-7000-8000-000000000001")

PARTITIONS = list(range(100, 100 + ROWS))
GROUPS = [1] * ROWS
NEW_ITEMS = list(range(10_000_000, 10_000_000 + ROWS))
LEASED_ITEMS = list(range(1_000_001, 1_000_001 + ROWS))
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "push": (
        PARTITIONS,
        [100] * ROWS,
        [1] * ROWS,
        list(range(1, ROWS + 1)),
        [100] * ROWS,
        [1] * ROWS,
        [b"x" * 24] * ROWS,
        [b"body"] * ROWS,
    ),
    "push_one": (200, 100, 1, b"x" * 24, b"body"),
    "lock_partitions": (PARTITIONS,),
    "partition_histories": (PARTITIONS, [3600.0] * ROWS, 16),
    "segment_ids_from": (PARTITIONS, [50] * ROWS),
    "segment_ids_before": (1, 1 << 62, 500, 3600.0),
    "segment_at": (1, 50_000),
    "ensure_cursors": (PARTITIONS, [3] * ROWS),
    "claim": (
        PARTITIONS,
        GROUPS,
        [10] * ROWS,
        [LEASE] * ROWS,
        [60.0] * ROWS,
        [False] * ROWS,
        [0.0] * ROWS,
        [0] * ROWS,
        [0] * ROWS,
        [1 << 62] * ROWS,
        1 << 24,
    ),
    "claim_fresh": (
        PARTITIONS,
        [3] * ROWS,
        [10] * ROWS,
        [LEASE] * ROWS,
        [60.0] * ROWS,
        [False] * ROWS,
        [0.0] * ROWS,
        [0] * ROWS,
        [0] * ROWS,
        1 << 24,
    ),
    "segments_between": (1, 50_000, 50_100, 1 << 24),
    "log_spans": (PARTITIONS, [50] * ROWS, [60] * ROWS),
    "log_runs": (PARTITIONS, [50] * ROWS, [60] * ROWS, 1024, 8192),
    "log_sizes": (1, 50_000, 50_100, 100),
    "log_span_sizes": (PARTITIONS, [50] * ROWS, [60] * ROWS, 10),
    "unclaim": (PARTITIONS, GROUPS, [0] * ROWS, [10] * ROWS, [False] * ROWS),
    "why_unclaimed": (PARTITIONS, GROUPS, [0.0] * ROWS),
    "ripe_until": (PARTITIONS, GROUPS, [10] * ROWS, [5.0] * ROWS),
    "expire": (PARTITIONS, [1e9] * ROWS),
    "ack": (PARTITIONS, [2] * ROWS, [LEASE] * ROWS, [10] * ROWS),
    "lock_cursors": (PARTITIONS, GROUPS),
    "save_cursors": (
        PARTITIONS,
        GROUPS,
        [10] * ROWS,
        [10] * ROWS,
        [True] * ROWS,
        [True] * ROWS,
        [0.0] * ROWS,
        [0] * ROWS,
    ),
    "leased_ids": (PARTITIONS, [2] * ROWS),
    "renew": (PARTITIONS, [LEASE] * ROWS, [60.0] * ROWS),
    "partitions_by_ids": (PARTITIONS,),
    "partitions_by_names": ([1] * ROWS, [str(number) for number in PARTITIONS]),
    # A page here is 10 000 partitions; this is the page of a pop that looks for the next few.
    "ready_partitions": (1, 1, 100, ROWS, None),
    "ready_among": (PARTITIONS, 1),
    "partition_page_end": (1, 100, ROWS),
    "topic_enqueue": (
        [1],
        [1] * ROWS,
        [f"new-{number}" for number in range(ROWS)],
        NEW_ITEMS,
        NEW_ITEMS,
        [1] * ROWS,
        [0] * ROWS,
        [datetime(2026, 1, 1, tzinfo=UTC)] * ROWS,
        [0.0] * ROWS,
        [60.0] * ROWS,
        [f"new-{number}" for number in range(ROWS)],
        [True] * ROWS,
        [b"{}"] * ROWS,
        [b"body"] * ROWS,
    ),
    "topic_flush": (
        [1],
        [1],
        [0.0],
        NEW_ITEMS,
        [1] * ROWS,
        [0] * ROWS,
        [datetime(2026, 1, 1, tzinfo=UTC)] * ROWS,
        [0.0] * ROWS,
        [60.0] * ROWS,
        [1] * ROWS,
        [True] * ROWS,
        [b"{}"] * ROWS,
        [b"payload"] * ROWS,
    ),
    "claim_topic_keys": (["ns"] * ROWS, [f"key-{number}" for number in range(ROWS)], [0] * ROWS),
    "topic_key_owners": ([1] * ROWS, [f"key-{number}" for number in range(ROWS)]),
    "topic_claim": ([1, 2], [ROWS, 1], [0, ROWS], [0, ROWS], [30.0, 30.0], ["a", "b"], False, 1 << 24),
    "topic_next_due": ([1, 2], [datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)]),
    "topic_give_back": ([1], LEASED_ITEMS, ["owner"] * ROWS),
    "topic_ack": (LEASED_ITEMS, [3] * ROWS, ["owner"] * ROWS),
    "topic_ack_repeated": (LEASED_ITEMS, [3] * ROWS, ["owner"] * ROWS),
    "topic_extend": (LEASED_ITEMS, [3] * ROWS, ["owner"] * ROWS, [60.0] * ROWS),
    "topic_nack": ([1], LEASED_ITEMS, [3] * ROWS, ["owner"] * ROWS, ["error"] * ROWS, [False] * ROWS),
    "topic_expired_leases": (datetime(2026, 1, 1, tzinfo=UTC), ROWS),
    "topic_expire_leases": ([1], LEASED_ITEMS, "error"),
    "partitions_after": (1, 100, ROWS, 60.0),
    "look_aged": (PARTITIONS, 60.0),
    "look_consumed": (PARTITIONS, 60.0),
    "look_waiting": (PARTITIONS, 60.0),
    "raise_floors_aged": (PARTITIONS, 60.0, 16),
    "raise_floors_consumed": (PARTITIONS, 60.0, 16),
    "raise_floors_waiting": (PARTITIONS, 60.0, 16),
    "sweep": (PARTITIONS, [0] * ROWS, 100),
}
# A lane runs these all the time; sorting would mean that rows are read which are not needed, or in the wrong order.
UNSORTED = {"push_one", "claim", "claim_fresh", "ack", "renew", "why_unclaimed", "save_cursors", "ready_partitions"}
UNSORTED |= {"partitions_after", "look_aged", "look_consumed", "look_waiting"}


@pytest.fixture(scope="module")
def empty(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database on its first day: nothing in it, nothing known about it."""
    yield from _database(postgres, "plans_empty")


@pytest.fixture(scope="module")
def full(postgres: EmbeddedPostgres) -> Iterator[str]:
    """10 000 partitions with 1 000 000 messages in segments of 100, a long partition, and cursors of two groups."""
    for dsn in _database(postgres, "plans_full"):
        asyncio.run(_fill(dsn))
        yield dsn


@pytest.fixture
async def hot(request: pytest.FixtureRequest, full: str, empty: str) -> AsyncIterator[Connection]:
    """A connection as the fused lanes have it, to the database that the test names."""
    dsn = {"full": full, "empty": empty}[getattr(request, "param", "full")]
    connection = await Database(dsn).connect()
    yield connection
    await connection.close()


@pytest.mark.parametrize("hot", ["empty", "full"], indirect=True)
@pytest.mark.parametrize("name", ARGUMENTS)
async def test_a_hot_statement_reads_no_table_from_end_to_end(hot: Connection, name: str) -> None:
    for node in await _plan(hot, name):
        assert not (node["Node Type"] == "Seq Scan" and node["Relation Name"] in TABLES), node
        assert not (node["Node Type"] == "Index Scan" and "Index Cond" not in node), node


@pytest.mark.parametrize("hot", ["empty", "full"], indirect=True)
@pytest.mark.parametrize("name", sorted(UNSORTED))
async def test_a_hot_statement_sorts_nothing(hot: Connection, name: str) -> None:
    assert [node for node in await _plan(hot, name) if "Sort" in node["Node Type"]] == []


@pytest.mark.parametrize("name", ["push", "lock_partitions"])
async def test_partitions_are_locked_in_the_order_of_their_index(hot: Connection, name: str) -> None:
    assert [node for node in await _plan(hot, name) if "Sort" in node["Node Type"]] == []


@pytest.mark.parametrize("name", ["push", "lock_partitions", "lock_cursors"])
async def test_rows_are_locked_in_order(hot: Connection, name: str) -> None:
    """What orders the locks is either an index or a sort of no more rows than were asked for."""
    nodes = await _plan(hot, name)
    (lock,) = (node for node in nodes if node["Node Type"] == "LockRows")
    below = _nodes(lock)[1:]
    assert all(node["Plan Rows"] <= 100 for node in below)
    assert any("Sort" in node["Node Type"] or node["Node Type"].startswith("Index") for node in below)


@pytest.mark.parametrize("name", ["claim", "ack", "save_cursors", "renew", "unclaim"])
async def test_cursors_are_updated_in_the_order_in_which_they_are_given(hot: Connection, name: str) -> None:
    """Nested loops from the arguments outwards: callers sort them, so no deadlock is possible."""
    nodes = await _plan(hot, name)
    (update,) = (node for node in nodes if node["Node Type"] == "ModifyTable")
    node = update["Plans"][0]
    while node["Node Type"] == "Nested Loop":
        node = node["Plans"][0]
    assert node["Node Type"] == "Function Scan"


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_a_hot_statement_touches_few_pages(hot: Connection, name: str) -> None:
    async with rolled_back(hot):
        plan, *_ = await _plan(hot, name, options="ANALYZE, BUFFERS, TIMING OFF")
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < MOST_PAGES


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("queue_stats", (None,)),
        ("queue_stats", ([1],)),
        ("group_lags", ([], [], [])),
        ("group_list", ([1, 2, 3], [], [], [])),
        ("dead_letter_counts", ()),
        ("queue_list", ("", "", "", "created", True, None, 100, 0, [])),
        ("queue_list", ("", "", "EUE-1", "name", False, None, 100, 0, [])),
        ("queue_list", ("", "", "", "pending", True, [1], None, 0, [])),
        ("group_partition_page", (1, 1, "", "name", False, 100, 0, "queue-1")),
        ("partition_page", ("", False, 100, 0)),
        ("queue_partition_page", (1, "", "stored", True, 100, 0)),
    ],
)
async def test_what_dashboards_ask_for_is_read_without_a_look_at_segments(
    full: str, name: str, arguments: tuple[Any, ...]
) -> None:
    database = Database(full)
    async with database.connection() as connection:
        rows = await connection.fetch(f"EXPLAIN {database.statements[name]}", *arguments)
        assert not any("segments" in row[0] for row in rows), rows
        assert await connection.fetch(database.statements[name], *arguments) or name == "dead_letter_counts"
    await database.close()


async def test_the_statements_that_change_rows_found_them(hot: Connection) -> None:
    """What is guarded above is the work itself and not a statement that finds nothing to do."""
    topic_statements = ("topic_claim", "topic_ack", "topic_extend", "topic_nack")
    for name in ("push", "push_one", "claim", "claim_fresh", "ack", "save_cursors", "renew", *topic_statements):
        transaction = hot.transaction()
        await transaction.start()
        arguments = ARGUMENTS[name]
        if name == "renew":
            await hot.execute("UPDATE queen.cursors SET lease_id = $1 WHERE group_id = 2", LEASE)
        rows = await hot.fetch(Database("").statements[name], *arguments)
        await transaction.rollback()
        assert len(rows) == (1 if name.startswith("push") else ROWS + (name == "topic_claim")), name
        assert name != "push" or rows[0]["open"]


@pytest.mark.parametrize(
    ("name", "types", "arguments"),
    [
        ("ready_partitions", "int, int, bigint, bigint, timestamptz", (1, 1, 100, SIZE, None)),
        ("partition_page_end", "int, bigint, bigint", (1, 100, SIZE)),
        ("partitions_after", "int, bigint, bigint, float8", (1, 100, SIZE, 60.0)),
        ("queue_partitions_after", "int, bigint, bigint, text", (1, SIZE, 0, "")),
        ("queue_partitions_after", "int, bigint, bigint, text", (1, SIZE, 0, "p5")),
        ("queue_partition_page", "int, text, text, bool, bigint, bigint", (1, "", "name", False, SIZE, 0)),
        ("queue_partition_page", "int, text, text, bool, bigint, bigint", (1, "", "name", True, SIZE, 0)),
    ],
)
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "hot"])
async def test_a_page_of_partitions_is_read_without_the_others(
    full: str, name: str, types: str, arguments: tuple[Any, ...], pooled: bool
) -> None:
    """On the connections of the pool too, where plans are made for the queue at hand."""
    database = Database(full)
    async with database.connection() as connection:
        session = connection if pooled else await database.connect()
        for size in (ROWS, 1000):
            literals = ", ".join(_literal(size if value == SIZE else value) for value in arguments)
            await session.execute(f"PREPARE page_{size} ({types}) AS {database.statements[name]}")
            text = await session.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE page_{size} ({literals})")
            for node in _nodes(msgspec.json.decode(text)[0]["Plan"]):
                assert node["Actual Rows"] * node["Actual Loops"] <= size, node
                assert node.get("Rows Removed by Filter", 0) == 0, node
        if not pooled:
            await session.close()
    await database.close()


async def test_a_page_of_all_partitions_is_read_without_the_others(full: str) -> None:
    database = Database(full)
    async with database.connection() as connection:
        text = await connection.fetchval(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {database.statements['partition_page']}", "", False, 100, 50
        )
    await database.close()
    for node in _nodes(msgspec.json.decode(text)[0]["Plan"]):
        if node.get("Relation Name") == "partitions":
            assert node["Actual Rows"] * node["Actual Loops"] <= 300, node


@asynccontextmanager
async def rolled_back(connection: Connection) -> AsyncIterator[None]:
    """Nothing of what is done inside stays."""
    transaction = connection.transaction()
    await transaction.start()
    yield
    await transaction.rollback()


async def _plan(
    connection: Connection, name: str, arguments: tuple[Any, ...] | None = None, options: str = "ANALYZE OFF"
) -> list[dict[str, Any]]:
    """The nodes of the plan with which the statement is run, whatever its arguments."""
    assert await connection.fetchval("SHOW plan_cache_mode") == "force_generic_plan"
    sql = Database("").statements[name]
    prepared = f"guarded_{name}"
    types = await connection.prepare(sql)
    names = ", ".join(
        f"{kind.name.removesuffix('[]')}{'[]' * kind.name.endswith('[]')}" for kind in types.get_parameters()
    )
    await connection.execute(f"DEALLOCATE PREPARE ALL; PREPARE {prepared} ({names}) AS {sql}")
    literals = ", ".join(_literal(value) for value in arguments or ARGUMENTS[name])
    text = await connection.fetchval(f"EXPLAIN ({options}, FORMAT JSON) EXECUTE {prepared} ({literals})")
    return _nodes(msgspec.json.decode(text)[0]["Plan"])


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"ARRAY[{', '.join(_literal(one) for one in value)}]"
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'::bytea"
    if isinstance(value, uuid.UUID | datetime | str):
        return f"'{value}'" + "::uuid" * isinstance(value, uuid.UUID) + "::timestamptz" * isinstance(value, datetime)
    return "NULL" if value is None else str(value)


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for below in plan.get("Plans", ()) for node in _nodes(below))]


def _database(postgres: EmbeddedPostgres, name: str) -> Iterator[str]:
    asyncio.run(_execute(postgres.dsn(), f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}"))
    yield postgres.dsn(name)
    asyncio.run(_execute(postgres.dsn(), f"DROP DATABASE {name} WITH (FORCE)"))


_ITEMS = (
    "INSERT INTO queen.topic_items (id, deliver_after, created_at, updated_at, topic_id, priority, is_json, payload)"
)


async def _fill(dsn: str) -> None:
    await _execute(
        dsn,
        "INSERT INTO queen.queues (name) SELECT 'queue-' || n FROM generate_series(1, 20) n",
        "INSERT INTO queen.groups (name) SELECT 'group-' || n FROM generate_series(1, 3) n",
        "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at)"
        " SELECT 1, n::text, 100, now() FROM generate_series(1, 10000) n",
        "INSERT INTO queen.partitions (queue_id, name) SELECT 2 + n % 19, n::text FROM generate_series(1, 2000) n",
        "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
        " SELECT n, 0, 100, now(), decode(repeat('00', 816), 'hex'), '\\x00' FROM generate_series(1, 10000) n",
        "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
        " SELECT 1, 100 * n, 100, now(), decode(repeat('00', 816), 'hex'), '\\x00' FROM generate_series(1, 1000) n",
        "UPDATE queen.partitions SET next_offset = 100100 WHERE id = 1",
        "INSERT INTO queen.cursors (partition_id, group_id, committed) SELECT n, 1, 0 FROM generate_series(1, 12000) n",
        "INSERT INTO queen.cursors (partition_id, group_id, committed, lease_id, lease_end, lease_until)"
        f" SELECT n, 2, 0, '{LEASE}', 10, now() + interval '1 h' FROM generate_series(1, 12000) n",
        "INSERT INTO queen.topic_namespaces (name) VALUES ('ns')",
        "INSERT INTO queen.topics (namespace_id, name) SELECT 1, n::text FROM generate_series(1, 1000) n",
        # A deep topic, many shallow ones, and one whose items are leased.
        f"{_ITEMS} SELECT n, now() + (n - 190000) * interval '1 s', now(), now(), 1, n % 3, true, '\\x00'"
        " FROM generate_series(1, 200000) n",
        f"{_ITEMS} SELECT 500000 + n, now() - interval '1 s', now(), now(), 4 + n % 990, 0, true, '\\x00'"
        " FROM generate_series(1, 10000) n",
        f"{_ITEMS} SELECT 600000, now() - interval '1 s', now(), now(), 2, 0, true, '\\x00'",
        f"{_ITEMS} SELECT 1000000 + n, now() - interval '1 s', now(), now(), 3, 0, true, '\\x00'"
        " FROM generate_series(1, 10000) n",
        "UPDATE queen.topic_items SET leased_until = now() + interval '1 h', lease_owner = 'owner' WHERE topic_id = 3",
        "INSERT INTO queen.topic_heads SELECT topic_id, priority, min(deliver_after) FROM queen.topic_items"
        " GROUP BY topic_id, priority",
        "INSERT INTO queen.topic_keys SELECT 1, 'key-' || n, n, now() FROM generate_series(1, 20000) n",
        "INSERT INTO queen.topic_key_claims SELECT 'ns', 'key-' || n, 0 FROM generate_series(10, 20000) n",
        "ANALYZE",
    )


async def _execute(dsn: str, *statements: str) -> None:
    connection = await asyncpg.connect(dsn)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


async def test_payloads_are_not_analysed_and_of_hot_tables_only_a_few_thousand_rows(hot: Connection) -> None:
    """An automatic ANALYZE holds a snapshot; while it does, rows that are updated all the time pile up."""
    rows = await hot.fetch(
        """SELECT c.relname AS "table", a.attname AS "column", t.typname AS "type",
            coalesce(a.attstattarget, -1) AS target
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid
        WHERE c.relnamespace = 'queen'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped"""
    )
    payloads = {(row["table"], row["column"]): row["target"] for row in rows if row["type"] == "bytea"}
    assert len(payloads) >= 10
    assert {where for where, target in payloads.items() if target != 0} == set()
    hot_columns = [row["target"] for row in rows if row["table"] in ("segments", "topic_items")]
    assert hot_columns and all(0 <= target <= 10 for target in hot_columns)
