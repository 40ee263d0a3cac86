"""Pushing from SQL: a message exists if and only if the transaction that pushed it commits."""

from __future__ import annotations

import asyncio
import json
import random
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import asyncpg
import pytest

from queen.embedded import EmbeddedPostgres
from queen.storage.migrate import migrate
from tests.conftest import StartServer
from tests.support.ageing import is_inbox_empty, until
from tests.support.api import Api, payloads
from tests.support.database import Connection, dead_letters, make_queue, stored_ids, stored_messages
from tests.support.topic_api import TopicApi, values

Connect = Callable[[], Awaitable[Connection]]


@pytest.fixture
async def connect(dsn: str) -> AsyncIterator[Connect]:
    """Opens further sessions, closed with the test."""
    opened: list[Connection] = []

    async def connect() -> Connection:
        opened.append(await asyncpg.connect(dsn))
        return opened[-1]

    yield connect
    for connection in opened:
        await connection.close()


@pytest.fixture
def topics(api: Api) -> TopicApi:
    return TopicApi(api)


async def push(connection: Connection, payload: Any, partition: str = "Default", queue: str = "q") -> str:
    id: str = await connection.fetchval("SELECT queen.push($1, $2, $3)", queue, partition, json.dumps(payload))
    return id


async def drained(connection: Connection) -> None:
    """Until the inbox is empty."""
    await until(lambda: is_inbox_empty(connection))


async def stored_payloads(connection: Connection, queue: str = "q", partition: str = "Default") -> list[Any]:
    return [json.loads(message.payload) for message in await stored_messages(connection, queue, partition)]


async def totals(connection: Connection) -> tuple[int, int]:
    """How many messages were appended, and how many were duplicates."""
    row = await connection.fetchrow("SELECT appended, duplicates FROM queen.inbox_totals")
    assert row is not None
    return row["appended"], row["duplicates"]


async def test_a_message_is_delivered_with_all_that_was_given(api: Api, connection: Connection) -> None:
    trace = "0194f5a0-0000-7000-8000-000000000001"
    id = await connection.fetchval(
        "SELECT queen.push('orders', 'customer-7', '{\"order\": 1}'::jsonb,"
        " transaction_id => 'order-1', trace_id => $1)",
        trace,
    )
    assert id == "order-1"
    (message,) = await api.pop("orders", wait=True)
    assert (message["data"], message["partition"], message["transactionId"]) == ({"order": 1}, "customer-7", "order-1")
    assert message["traceId"] == trace
    resource = (await api.call("GET", "/api/v1/resources/queues/orders")).body
    assert (resource["namespace"], resource["totals"]["pending"]) == ("orders", 1)


async def test_a_parked_pop_wakes_when_the_transaction_commits(api: Api, connection: Connection) -> None:
    await api.push("q", "first")
    await api.ack(await api.pop("q"))
    waiting = asyncio.create_task(api.pop("q", wait=True, timeout=60_000))
    async with connection.transaction():
        id = await push(connection, "now")
        assert not (await asyncio.wait([waiting], timeout=0.2))[0]
    (message,) = await waiting
    assert (message["data"], message["transactionId"]) == ("now", id)


async def test_what_is_rolled_back_is_never_seen(api: Api, connection: Connection) -> None:
    transaction = connection.transaction()
    await transaction.start()
    await push(connection, "no")
    await transaction.rollback()
    async with connection.transaction():
        await push(connection, 1)
        with pytest.raises(asyncpg.DivisionByZeroError):
            async with connection.transaction():
                await push(connection, "nor this")
                await connection.execute("SELECT 1 / 0")
        await push(connection, 2)
        async with connection.transaction():
            await push(connection, 3)
        await push(connection, 4)
    await drained(connection)
    assert await stored_payloads(connection) == [1, 2, 3, 4]


async def test_a_long_transaction_delays_no_others_and_is_appended_when_it_commits(
    api: Api, connection: Connection, connect: Connect
) -> None:
    other = await connect()
    transaction = connection.transaction()
    await transaction.start()
    await push(connection, "early")
    for number in range(20):
        await push(other, number)
    await api.push("q", "by HTTP")
    await until(lambda: _count(other, 21))
    await push(connection, "late")
    await transaction.commit()
    await drained(connection)
    stored = await stored_payloads(connection)
    assert sorted(stored[:21], key=str) == sorted([*range(20), "by HTTP"], key=str)
    assert stored[21:] == ["early", "late"]


async def _count(connection: Connection, messages: int) -> bool:
    return bool(await connection.fetchval("SELECT sum(next_offset) = $1 FROM queen.partitions", messages))


async def test_a_transaction_that_pushed_while_the_server_was_busy_is_not_forgotten(
    start_server: StartServer, connection: Connection, connect: Connect
) -> None:
    """It need not notify a server that looks for itself; the server sleeps by the time it commits."""
    await start_server(sql_push_poll_ms=3_600_000)
    await push(connection, 0)
    await drained(connection)
    long, other = await connect(), await connect()
    transaction = long.transaction()
    stop = asyncio.Event()

    async def keep_busy() -> None:
        while not stop.is_set():
            await push(other, 0, partition="busy")

    busy = asyncio.create_task(keep_busy())
    await until(lambda: _is_awake(connection))
    await transaction.start()
    await push(long, "held")
    stop.set()
    await busy
    await until(lambda: _is_asleep(connection))
    await transaction.commit()
    await until(lambda: _is_stored(connection, "held"))


async def _is_awake(connection: Connection) -> bool:
    return bool(await connection.fetchval("SELECT last_value = 2 FROM queen.inbox_awake"))


async def _is_asleep(connection: Connection) -> bool:
    return not await _is_awake(connection)


async def _is_stored(connection: Connection, payload: Any) -> bool:
    return payload in await stored_payloads(connection)


async def test_transactions_side_by_side_come_in_one_piece_each_in_the_order_of_their_last_pushes(
    start_server: StartServer, connection: Connection, connect: Connect
) -> None:
    other = await connect()
    one, two = connection.transaction(), other.transaction()
    await one.start()
    await two.start()
    await push(connection, "a1")
    await push(other, "b1")
    await push(connection, "a2")
    await push(other, "b2")
    await push(connection, "a3")
    await one.commit()
    await two.commit()
    await start_server()
    await drained(connection)
    assert await stored_payloads(connection) == ["b1", "b2", "a1", "a2", "a3"]


async def test_a_transaction_id_is_accepted_once(api: Api, connection: Connection) -> None:
    await api.push("q", 1, ids=["a"])
    for id in ("a", "b", "b", "c"):
        await connection.execute("SELECT queen.push('q', NULL, '2', $1)", id)
    await connection.execute("SELECT queen.push_many('q', 'Default', ARRAY['3', '4']::jsonb[], ARRAY['c', 'd'])")
    await drained(connection)
    assert await stored_ids(connection, "q") == ["a", "b", "c", "d"]
    (again,) = await api.push("q", 5, ids=["d"])
    assert again["status"] == "duplicate"
    assert await totals(connection) == (3, 3)


async def test_many_messages_of_one_call_keep_their_order(api: Api, connection: Connection) -> None:
    for count in (0, 1, 999, 1000, 1001, 2500):
        pushed = (
            await connection.fetchval(
                "SELECT queen.push_many('q', $1, array_agg(to_jsonb(n) ORDER BY n)) FROM generate_series(1, $2) n",
                f"p{count}",
                count,
            )
            if count
            else await connection.fetchval("SELECT queen.push_many('q', 'p0', '{}')")
        )
        assert pushed == count
    ids = [f"id-{number}" for number in range(1500)]
    await connection.execute(
        "SELECT queen.push_many('q', 'named', (SELECT array_agg(to_jsonb(i)) FROM unnest($1::text[]) i), $1)", ids
    )
    await drained(connection)
    for count in (1, 999, 1000, 1001, 2500):
        assert await stored_payloads(connection, partition=f"p{count}") == list(range(1, count + 1))
    assert await stored_ids(connection, "q", "named") == ids
    assert await stored_payloads(connection, partition="named") == ids


async def test_items_as_http_takes_them_go_to_any_queues(api: Api, connection: Connection) -> None:
    items = [
        {"queue": "a", "payload": {"n": 1}, "transactionId": "one"},
        {"queue": "b", "partition": "p", "data": [2]},
        {"queue": "a"},
    ]
    rows = await connection.fetch("SELECT queen.push_items($1) AS id", json.dumps(items))
    assert rows[0]["id"] == "one"
    await drained(connection)
    assert await stored_payloads(connection, "a") == [{"n": 1}, None]
    assert await stored_payloads(connection, "b", "p") == [[2]]
    assert await stored_ids(connection, "a") == [rows[0]["id"], rows[2]["id"]]
    assert await stored_ids(connection, "b", "p") == [rows[1]["id"]]


async def test_a_select_pushes_a_row_for_each_row(api: Api, connection: Connection) -> None:
    await connection.execute(
        "SELECT queen.push('q', 'p' || n % 3, jsonb_build_object('n', n)) FROM generate_series(1, 90) n"
    )
    await drained(connection)
    for rest in range(3):
        stored = [one["n"] for one in await stored_payloads(connection, partition=f"p{rest}")]
        assert stored == [n for n in range(1, 91) if n % 3 == rest]


async def test_items_of_topics_have_priority_time_key_and_metadata(topics: TopicApi, connection: Connection) -> None:
    await connection.execute("SELECT queen.enqueue('ns', 't', '\"last\"', 9, metadata => '{\"a\": 1}')")
    await connection.execute("SELECT queen.enqueue('ns', 't', '\"first\"', 1, key => 'k', ttl => interval '1 hour')")
    await connection.execute("SELECT queen.enqueue('ns', 't', '\"again\"', 1, key => 'k')")
    await connection.execute("SELECT queen.enqueue('ns', 't', '\"later\"', deliver_after => now() + interval '1 day')")
    many = "SELECT queen.enqueue_many('ns', 't', ARRAY['2', '3', '4']::jsonb[], 5, keys => ARRAY[NULL, 'k', 'k2'])"
    assert await connection.fetchval(many) == 3
    items = [
        {"namespace": "ns", "topic": "t", "data": 5, "priority": 6},
        {"namespace": "ns", "topic": "other", "delay": 3600},
    ]
    assert await connection.fetchval("SELECT queen.enqueue_items($1)", json.dumps(items)) == 2
    await drained(connection)
    leased = await topics.dequeue()
    assert values(leased) == ["first", 2, 4, 5, "last"]
    assert (leased[0]["idempotency_key"], leased[-1]["metadata"]) == ("k", {"a": 1})
    assert leased[0]["expires_at"] is not None
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_items WHERE deliver_after > now()") == 2
    assert await totals(connection) == (7, 2)


async def test_a_waiting_dequeue_wakes_when_the_transaction_commits(topics: TopicApi, connection: Connection) -> None:
    waiting = asyncio.create_task(topics.dequeue(wait=True, timeout=60_000))
    await connection.execute("SELECT queen.enqueue('ns', 't', '1')")
    assert values(await waiting) == [1]


def _enqueue_item(field: str) -> str:
    return f'queen.enqueue_items(\'[{{"namespace": "n", "topic": "t", {field}}}]\')'


BAD: list[tuple[str, str, str]] = [
    ("queen.push(NULL, 'p', '1')", "22004", "queue must not be null"),
    ("queen.push('', 'p', '1')", "22023", "queue must not be empty"),
    ("queen.push(repeat('q', 256), 'p', '1')", "22001", "queue must be at most 255 characters, not 256"),
    ("queen.push(E'a\\nb', 'p', '1')", "22023", "queue must not contain control characters"),
    ("queen.push('q', U&'a\\200bb', '1')", "22023", "partition must not contain control characters"),
    ("queen.push('q', '', '1')", "22023", "partition must not be empty"),
    ("queen.push('q', 'p', NULL)", "22004", "payload must not be null"),
    ("queen.push('q', 'p', '1', repeat('x', 256))", "22001", "transaction_id must be at most 255"),
    ("queen.push('q', 'p', to_jsonb(repeat('x', 68000000)))", "54000", "too large to be pushed at once"),
    ("queen.push_many('q', 'p', NULL)", "22004", "payload must not be null"),
    ("queen.push_many('q', 'p', ARRAY['1', NULL]::jsonb[])", "22004", "payload must not be null"),
    ("queen.push_many('q', 'p', ARRAY[ARRAY['1']]::jsonb[])", "2202E", "one dimension"),
    ("queen.push_many('q', 'p', ARRAY['1']::jsonb[], ARRAY['a', 'b'])", "2202E", "1 payloads were given, and 2"),
    ("queen.push_many('q', 'p', ARRAY['1']::jsonb[], ARRAY[repeat('x', 256)])", "22001", "at most 255"),
    ("queen.push_items('{}')", "22023", "items must be a JSON array"),
    ("queen.push_items('[1]')", "22023", "each item must be an object, not number (at items[0])"),
    ('queen.push_items(\'[{"queue": "q"}, {"qeue": 1}]\')', "22023", 'unknown field "qeue" (at items[1])'),
    ("queen.push_items('[{\"queue\": 1}]')", "22023", "queue must be a string, not number (at items[0])"),
    ("queen.push_items('[{\"payload\": 1}]')", "22004", "queue must not be null (at items[0])"),
    ('queen.push_items(\'[{"queue": "q"}, {"queue": "q", "payload": 1, "data": 2}]\')', "22023", "(at items[1])"),
    ("queen.enqueue('', 't', '1')", "22023", "namespace must not be empty"),
    ("queen.enqueue('ns', NULL, '1')", "22004", "topic must not be null"),
    ("queen.enqueue('ns', 't', NULL)", "22004", "payload must not be null"),
    ("queen.enqueue('ns', 't', '1', key => E'\\t')", "22023", "key must not contain control characters"),
    ("queen.enqueue('ns', 't', '1', deliver_after => 'infinity')", "22023", "deliver_after must be a moment"),
    ("queen.enqueue('ns', 't', '1', deliver_after => '10000-01-01Z')", "22023", "in the years 1 to 9999"),
    ("queen.enqueue('ns', 't', '1', deliver_after => '4000-01-01Z BC')", "22023", "in the years 1 to 9999"),
    ("queen.enqueue('ns', 't', '1', ttl => interval '-1 s')", "22023", "ttl must be between"),
    ("queen.enqueue('ns', 't', '1', metadata => '[]')", "22023", "metadata must be a JSON object"),
    ("queen.enqueue_many('ns', 't', ARRAY['1']::jsonb[], keys => '{}')", "2202E", "1 payloads were given, and 0 keys"),
    (
        'queen.enqueue_items(\'[{"namespace": "n", "topic": "t", "delay": 1, "deliver_after": "2030-01-01"}]\')',
        "22023",
        "exclude each other",
    ),
    ('queen.push_items(\'[{"queue": "q"}, {"queue": "q", "traceId": "x"}]\')', "22P02", "(at items[1])"),
    (_enqueue_item('"priority": 1.5'), "22P02", "(at items[0])"),
    (_enqueue_item('"delay": "soon"'), "22P02", "(at items[0])"),
    (_enqueue_item('"delay": 1e300'), "22008", "(at items[0])"),
    (_enqueue_item('"delay": 1e12'), "22023", "in the years 1 to 9999"),
    (_enqueue_item('"deliver_after": "soon"'), "22007", "(at items[0])"),
    (_enqueue_item('"deliver_after": "tomorrow"'), "22007", 'deliver_after is no time: "tomorrow" (at items[0])'),
    (_enqueue_item('"deliver_after": "2030-31-01T12:00:00Z"'), "22008", "(at items[0])"),
    (_enqueue_item('"delay": -1'), "22023", "delay must not be negative (at items[0])"),
    (_enqueue_item('"idempotency_key": "\\u0001"'), "22023", "key must not contain control characters (at items[0])"),
    (_enqueue_item('"priority": "1"'), "22P02", "priority must be a number, not string (at items[0])"),
]


async def test_bad_input_is_an_error_with_a_hint_and_leaves_nothing(connection: Connection) -> None:
    for call, state, text in BAD:
        with pytest.raises(asyncpg.PostgresError) as error:
            await connection.execute(f"SELECT {call}")
        assert (error.value.sqlstate, error.value.hint is not None) == (state, True), call
        assert text in str(error.value), call
    assert await is_inbox_empty(connection)


async def test_the_limit_of_a_call_counts_the_text_that_is_stored(connection: Connection) -> None:
    """Which jsonb may be much smaller than: compressed in a column, or with exponents in its numbers."""
    await make_queue(connection, "known")
    await connection.execute(
        "CREATE TEMP TABLE large AS SELECT one, ARRAY[one] AS many, jsonb_build_array(jsonb_build_object('queue', 'q',"
        " 'payload', one)) AS pushed, jsonb_build_array(jsonb_build_object('namespace', 'ns', 'topic', 't', 'data',"
        " one)) AS enqueued FROM (SELECT to_jsonb(repeat('x', 68000000)) AS one) l"
    )
    # With plans of their own for each call, parameters are uncompressed before they are looked at.
    await connection.execute("SET plan_cache_mode = force_generic_plan")
    numbers = "(SELECT jsonb_agg('1e131000'::jsonb) FROM generate_series(1, 600))"
    for call in (
        "queen.push('known', 'p', one)",
        "queen.push('q', 'p', one)",
        f"queen.push('known', 'p', {numbers})",
        "queen.push_many('q', 'p', many)",
        f"queen.push_many('q', 'p', ARRAY[{numbers}])",
        "queen.push_many('q', 'p', (SELECT array_agg('1e131000'::jsonb) FROM generate_series(1, 2000)))",
        "queen.push_items(pushed)",
        "queen.enqueue('ns', 't', one)",
        "queen.enqueue_many('ns', 't', many)",
        "queen.enqueue_items(enqueued)",
    ):
        with pytest.raises(asyncpg.ProgramLimitExceededError, match="too large to be pushed at once") as error:
            await connection.execute(f"SELECT {call} FROM large")
        assert error.value.hint, call
    assert await is_inbox_empty(connection)


async def test_sql_takes_no_name_that_the_server_refuses(connection: Connection) -> None:
    """It would be refused after the commit, when the caller can get no error."""
    taken = await connection.fetch(
        "SELECT i FROM generate_series(1, 1114111) i WHERE i NOT BETWEEN 55296 AND 57343 AND queen.is_printable(chr(i))"
    )
    codes = {row["i"] for row in taken}
    assert [code for code in codes if not chr(code).isprintable()] == []
    # Newer Pythons know more characters than there were in Unicode 14, on which hosts of all of them agree.
    assert unicodedata.unidata_version != "14.0.0" or len(codes) == sum(
        chr(code).isprintable() for code in range(0x110000)
    )
    for name in ("unassigned \u0378", "private \U000f0000", "tag \U000e0001"):
        with pytest.raises(asyncpg.PostgresError, match="partition must not contain control characters"):
            await push(connection, 1, partition=name)


async def test_a_time_without_a_zone_is_utc_in_any_session(topics: TopicApi, connection: Connection) -> None:
    await connection.execute("SET timezone = 'Asia/Kathmandu'")
    items = [{"namespace": "ns", "topic": "t", "data": 1, "deliver_after": "2030-01-31T12:00:00"}]
    await connection.execute("SELECT queen.enqueue_items($1)", json.dumps(items))
    await drained(connection)
    assert await connection.fetchval("SELECT deliver_after = '2030-01-31T12:00:00Z' FROM queen.topic_items")


async def test_items_are_the_same_where_backslashes_are_escapes(topics: TopicApi, connection: Connection) -> None:
    """Applications that set this are old, but PostgreSQL 18 still takes it."""
    await connection.execute("SET standard_conforming_strings = off")
    items = [{"namespace": "ns", "topic": "t\\t", "data": '\\ \n "', "deliver_after": "2020-01-31T12:00:00.25+01:00"}]
    await connection.execute("SELECT queen.enqueue_items($1)", json.dumps(items))
    await drained(connection)
    assert values(await topics.dequeue(namespace="ns", topic="t\\t")) == ['\\ \n "']


async def test_the_first_and_the_last_moment_that_may_be_given_arrive(topics: TopicApi, connection: Connection) -> None:
    for moment in ("0001-01-01Z", "9999-12-31T23:59:59.999999Z"):
        await connection.execute("SELECT queen.enqueue('ns', 't', '1', deliver_after => $1::text::timestamptz)", moment)
    await drained(connection)
    assert await connection.fetchval("SELECT appended FROM queen.inbox_totals") == 2


async def test_a_full_queue_refuses_and_what_slips_through_is_a_dead_letter(api: Api, connection: Connection) -> None:
    await api.configure("q", maxSize=2)
    async with connection.transaction():
        for number in range(3):
            await connection.execute("SELECT queen.push('q', 'Default', $1, $2)", json.dumps(number), f"id-{number}")
        await connection.execute("SELECT queen.push('other', 'Default', '1')")
    await drained(connection)
    assert await stored_payloads(connection) == [0, 1]
    assert await stored_payloads(connection, "other") == [1]
    ((id, error, _),) = await dead_letters(connection, "q")
    assert id == "id-2"
    assert "would exceed max capacity (2)" in error
    with pytest.raises(asyncpg.ConfigurationLimitExceededError, match=r"capacity of 2 messages: it holds 2") as refused:
        await push(connection, "too much")
    assert "maxSize" in (refused.value.hint or "")
    await api.ack(await api.pop("q", batch=2))
    answer = await api.call("POST", "/api/v1/dlq/retry", {"queue": "q"})
    assert answer.status == 200, answer
    assert payloads(await api.pop("q")) == [2]
    assert await dead_letters(connection, "q") == []


async def test_dead_letters_are_retried_in_the_order_in_which_they_were_pushed(
    api: Api, connection: Connection
) -> None:
    await api.configure("q", maxSize=1)
    async with connection.transaction():
        for number in range(3):
            await push(connection, number)
    await drained(connection)
    assert len(await dead_letters(connection, "q")) == 2
    await api.configure("q", maxSize=0)
    assert (await api.call("POST", "/api/v1/dlq/retry", {"queue": "q"})).status == 200
    assert payloads(await api.pop("q", batch=10)) == [0, 1, 2]


async def test_items_over_quota_are_refused_and_what_slips_through_is_a_dead_letter(
    start_server: StartServer, connection: Connection
) -> None:
    """PostgreSQL does not know the quotas of the settings."""
    topics = TopicApi(await start_server(namespace_quotas=(("strict", 2),)))
    for number in range(3):
        await connection.execute("SELECT queen.enqueue('strict', 't', $1)", json.dumps(number))
    await drained(connection)
    assert values(await topics.dequeue(namespace="strict")) == [0, 1]
    row = await connection.fetchrow("SELECT payload, last_error FROM queen.topic_dead_letters")
    assert row is not None
    assert row["payload"] == b"2"
    assert "2 items per minute" in row["last_error"]
    await topics.good("PUT", "/quotas", {"namespace": "ns", "per_minute": 1})
    await connection.execute("SELECT queen.enqueue('ns', 't', '1')")
    await drained(connection)
    with pytest.raises(asyncpg.ConfigurationLimitExceededError, match="may enqueue 1 items per minute"):
        await connection.execute("SELECT queen.enqueue('ns', 't', '2')")


async def test_an_encrypted_queue_takes_nothing_in_clear_unless_told_to(
    start_server: StartServer, connection: Connection
) -> None:
    key = "11" * 32
    api = await start_server(queen_encryption_key=(key,))
    await api.configure("secret", encryptionEnabled=True)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="is encrypted") as error:
        await push(connection, "no", queue="secret")
    assert "queen.clear_inbox" in (error.value.hint or "")
    await connection.execute("SET queen.clear_inbox = on")
    await push(connection, "sealed", queue="secret")
    (message,) = await api.pop("secret", wait=True)
    assert message["data"] == "sealed"
    body = await connection.fetchval("SELECT body FROM queen.segments")
    assert b"sealed" not in body


async def test_a_server_without_the_key_keeps_what_is_to_be_encrypted_and_appends_the_rest(
    start_server: StartServer, connection: Connection
) -> None:
    await make_queue(connection, "secret", encryption_enabled=True)
    await connection.execute("SET queen.clear_inbox = on")
    await push(connection, "kept", queue="secret")
    await push(connection, "goes on")
    await start_server()
    await until(lambda: _is_stored(connection, "goes on"))
    await push(connection, "later")
    await until(lambda: _is_stored(connection, "later"))
    assert await connection.fetchval("SELECT array_agg(queue) FROM queen.inbox") == ["secret"]
    assert await connection.fetchval("SELECT count(*) FROM queen.segments") == 2


async def test_while_push_maintenance_is_on_pushes_wait_in_the_inbox(api: Api, connection: Connection) -> None:
    await push(connection, 1)
    await drained(connection)
    await api.call("POST", "/api/v1/system/maintenance", {"enabled": True})
    await push(connection, 2)
    await api.push("q", "spooled")
    await asyncio.sleep(0.1)
    assert not await is_inbox_empty(connection)
    await api.call("POST", "/api/v1/system/maintenance", {"enabled": False})
    await until(lambda: _count(connection, 3))
    assert sorted(await stored_payloads(connection), key=str) == [1, 2, "spooled"]


async def test_a_row_that_cannot_be_appended_is_put_aside_and_blocks_nothing(
    start_server: StartServer, connection: Connection
) -> None:
    for queue, body in (("q", "[1]"), ("q", "not json"), ("\x01", "[1]"), ("q", "[2]"), ("other", "[3]")):
        await connection.execute(
            "INSERT INTO queen.inbox (queue, partition, body) VALUES ($1, 'Default', $2)", queue, body
        )
    await connection.execute("INSERT INTO queen.inbox (topic, queue, partition, body) VALUES (true, 'ns', 't', '[{}]')")
    api = await start_server()
    await drained(connection)
    assert await stored_payloads(connection) == [1, 2]
    assert await stored_payloads(connection, "other") == [3]
    refused = await connection.fetch("SELECT queue, reason FROM queen.inbox_refused ORDER BY id")
    assert [row["queue"] for row in refused] == ["q", "\x01", "ns"]
    assert all(row["reason"] for row in refused)
    metrics = (await api.call("GET", "/metrics/prometheus")).body
    for line in (
        "queen_inbox_rows 0.0",
        "queen_inbox_oldest_seconds 0.0",
        'queen_inbox_messages_total{outcome="appended"} 3.0',
        'queen_inbox_messages_total{outcome="refused"} 3.0',
    ):
        assert line in metrics.splitlines(), metrics


async def test_what_was_restored_with_numbers_of_other_transactions_is_found(
    start_server: StartServer, connection: Connection
) -> None:
    await connection.execute(
        "INSERT INTO queen.inbox (xid, queue, partition, body) VALUES ('99999999999', 'q', 'Default', '[1]')"
    )
    await start_server()
    await drained(connection)
    assert await stored_payloads(connection) == [1]


async def test_a_queue_that_was_deleted_is_made_again(api: Api, connection: Connection) -> None:
    await push(connection, 1, queue="billing.ingest")
    await drained(connection)
    assert (await api.call("DELETE", "/api/v1/resources/queues/billing.ingest")).status == 200
    await push(connection, 2, queue="billing.ingest")
    await drained(connection)
    assert await stored_payloads(connection, "billing.ingest") == [2]
    row = await connection.fetchrow("SELECT namespace, task FROM queen.queues")
    assert row is not None
    assert tuple(row) == ("billing", "ingest")


async def test_a_server_with_sql_push_off_leaves_the_inbox_alone(
    start_server: StartServer, connection: Connection
) -> None:
    await push(connection, 1)
    api = await start_server(queen_sql_push=False)
    await api.push("other", 1)
    assert not await is_inbox_empty(connection)
    assert "queen_inbox_rows 1.0" in (await api.call("GET", "/metrics/prometheus")).body


async def test_another_host_goes_on_when_the_one_that_appends_is_gone(
    start_server: StartServer, connection: Connection, tmp_path: Path
) -> None:
    first = await start_server(num_workers=2)
    await push(connection, 0)
    await drained(connection)
    assert first.worker is not None
    second = await start_server(worker_id=1, num_workers=2, queen_data_dir=tmp_path / "data")
    other = await start_server(queen_data_dir=tmp_path / "other", pop_safety_poll_ms=200)
    popped = asyncio.create_task(other.pop("q", consumerGroup="g", wait=True, subscriptionMode="new", timeout=60_000))
    await push(connection, 1)
    await drained(connection)
    await first.worker.stop()
    await push(connection, 2)
    await drained(connection)
    assert payloads(await second.pop("q", batch=5, wait=True)) == [0, 1, 2]
    assert payloads(await popped)


@asynccontextmanager
async def as_role(dsn: str, role: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(f"SET ROLE {role}")
        yield connection
    finally:
        await connection.close()


async def test_the_role_of_producers_may_push_and_nothing_else(api: Api, connection: Connection, dsn: str) -> None:
    async with as_role(dsn, "queen_producer") as producer:
        await push(producer, 1)
        await producer.execute("SELECT queen.push_many('q', 'Default', ARRAY['2']::jsonb[])")
        await producer.execute('SELECT queen.push_items(\'[{"queue": "q", "payload": 3}]\')')
        await producer.execute("SELECT queen.enqueue('ns', 't', '1')")
        await producer.execute("SELECT queen.enqueue_many('ns', 't', ARRAY['1']::jsonb[])")
        await producer.execute('SELECT queen.enqueue_items(\'[{"namespace": "ns", "topic": "t"}]\')')
        for statement in (
            "SELECT * FROM queen.inbox",
            "INSERT INTO queen.inbox (queue, partition, body) VALUES ('q', 'p', '[1]')",
            "DELETE FROM queen.inbox",
            "SELECT * FROM queen.queues",
            "SELECT setval('queen.inbox_awake', 2)",
            "SELECT queen.check_push('q', 'p', 1)",
            "SELECT queen.complete_move(gen_random_uuid())",
            "CREATE TABLE queen.mine (id int)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await producer.execute(statement)
        # A function of the caller's must not be run with the rights of the owner.
        await producer.execute(
            "CREATE FUNCTION pg_temp.length(text) RETURNS integer LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'run as %', current_user; END $$"
        )
        await producer.execute("SET search_path = pg_temp, pg_catalog")
        await push(producer, 4)
    await drained(connection)
    assert await stored_payloads(connection) == [1, 2, 3, 4]
    relations = await connection.fetch(
        "SELECT c.relname FROM pg_class c WHERE c.relnamespace IN ('queen'::regnamespace, 'queen_proxy'::regnamespace)"
        " AND CASE WHEN c.relkind = 'S' THEN has_sequence_privilege('queen_producer', c.oid, 'USAGE, SELECT, UPDATE')"
        " WHEN c.relkind IN ('r', 'v', 'm', 'p') THEN has_table_privilege('queen_producer', c.oid,"
        " 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER') ELSE false END"
    )
    assert [row["relname"] for row in relations] == []
    trusted = await connection.fetch(
        "SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'queen'::regnamespace AND p.prosecdef"
        " AND has_function_privilege('queen_producer', p.oid, 'EXECUTE') ORDER BY 1"
    )
    assert [row["proname"] for row in trusted] == [
        "enqueue", "enqueue_items", "enqueue_many", "push", "push_items", "push_many",
    ]  # fmt: skip


async def test_other_roles_may_not_push(dsn: str, connection: Connection) -> None:
    await connection.execute("DROP ROLE IF EXISTS queen_stranger")
    await connection.execute("CREATE ROLE queen_stranger")
    try:
        async with as_role(dsn, "queen_stranger") as stranger:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await push(stranger, 1)
    finally:
        await connection.execute("DROP ROLE queen_stranger")


async def test_a_user_who_may_not_create_roles_can_migrate(tmp_path: Path) -> None:
    """In a cluster of its own: in the other, the role exists."""
    with EmbeddedPostgres(tmp_path / "pg", settings={"fsync": "off"}) as server:
        admin = await asyncpg.connect(server.dsn())
        await admin.execute("CREATE ROLE modest LOGIN")
        await admin.execute("CREATE DATABASE ours OWNER modest")
        await admin.close()
        await migrate(server.dsn("ours").replace("//postgres@", "//modest@"))
        connection = await asyncpg.connect(server.dsn("ours"))
        assert await connection.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = 'queen_producer'") == 0
        page = (Path(__file__).parents[3] / "docs" / "sql.md").read_text()
        (grants,) = [block for block in page.split("```sql\n")[1:] if "CREATE ROLE queen_producer" in block]
        await connection.execute(grants.split("```")[0])
        await connection.execute("SET ROLE queen_producer")
        await push(connection, 1)
        await connection.close()


ISOLATION: list[Literal["read_committed", "repeatable_read", "serializable"]] = [
    "read_committed",
    "repeatable_read",
    "serializable",
]


class History:
    """What random transactions have pushed, and when each was committed."""

    def __init__(self) -> None:
        self.committed: list[tuple[float, float, list[tuple[str, str]]]] = []
        """When it pushed first, when its commit had returned, and (partition, payload) of its messages in order."""
        self.rolled_back: set[str] = set()


async def push_at_random(connection: Connection, chance: random.Random, name: str, history: History) -> None:
    clock = asyncio.get_running_loop().time
    for step in range(25):
        pushed: list[tuple[str, str]] = []

        async def push_some(prefix: str, pushed: list[tuple[str, str]] = pushed) -> list[tuple[str, str]]:
            some: list[tuple[str, str]] = []
            for number in range(chance.randint(1, 4)):
                partition, count = f"p{chance.randrange(3)}", chance.choice((1, 1, 1, 3))
                values = [f"{prefix}-{number}-{index}" for index in range(count)]
                if count == 1:
                    await push(connection, values[0], partition)
                else:
                    await connection.execute(
                        "SELECT queen.push_many('q', $1, (SELECT array_agg(to_jsonb(v)) FROM unnest($2::text[]) v))",
                        partition,
                        values,
                    )
                some += [(partition, value) for value in values]
            return some

        transaction = connection.transaction(isolation=chance.choice(ISOLATION))
        await transaction.start()
        began = clock()
        pushed += await push_some(f"{name}.{step}.a")
        await asyncio.sleep(chance.choice((0, 0, 0.002, 0.03)))
        savepoint = connection.transaction()
        await savepoint.start()
        some = await push_some(f"{name}.{step}.b")
        if chance.random() < 0.3:
            await savepoint.rollback()
            history.rolled_back |= {value for _, value in some}
        else:
            await savepoint.commit()
            pushed += some
        if chance.random() < 0.5:
            pushed += await push_some(f"{name}.{step}.c")
        if chance.random() < 0.2:
            await transaction.rollback()
            history.rolled_back |= {value for _, value in pushed}
        else:
            await transaction.commit()
            history.committed.append((began, clock(), pushed))
        if chance.random() < 0.1:
            await asyncio.sleep(0.1)


async def check_history(connection: Connection, history: History) -> None:
    """Each message once, none of what was rolled back, in the order of pushes and, where that is sure, of commits."""
    places: dict[str, tuple[str, int]] = {}
    for partition in ("p0", "p1", "p2"):
        for offset, value in enumerate(await stored_payloads(connection, "q", partition)):
            assert value not in places, "stored twice"
            places[value] = (partition, offset)
    assert not places.keys() & history.rolled_back
    assert places.keys() == {value for _, _, pushed in history.committed for _, value in pushed}
    for _, _, pushed in history.committed:
        for partition in ("p0", "p1", "p2"):
            offsets = [places[value][1] for own, value in pushed if own == partition]
            assert offsets == sorted(offsets)
            assert all(places[value][0] == own for own, value in pushed)
    for _, ended, before in history.committed:
        for began, _, after in history.committed:
            if ended >= began:
                continue
            for partition in ("p0", "p1", "p2"):
                first = [places[value][1] for own, value in before if own == partition]
                then = [places[value][1] for own, value in after if own == partition]
                assert not first or not then or max(first) < min(then), "a later transaction came first"


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_concurrent_transactions_lose_and_double_nothing_and_keep_their_order(
    api: Api, connection: Connection, connect: Connect, seed: int
) -> None:
    history = History()
    sessions = [await connect() for _ in range(8)]
    await asyncio.gather(
        *(
            push_at_random(session, random.Random(f"{seed}.{number}"), f"s{number}", history)
            for number, session in enumerate(sessions)
        )
    )
    await drained(connection)
    await check_history(connection, history)


async def test_a_trigger_pushes_what_changes(api: Api, connection: Connection) -> None:
    await connection.execute(
        "CREATE TABLE stock (sku text PRIMARY KEY, pieces int);"
        "CREATE FUNCTION announce_stock() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM queen.push('stock', NEW.sku, to_jsonb(NEW)); RETURN NULL; END $$;"
        "CREATE TRIGGER announce AFTER INSERT OR UPDATE ON stock FOR EACH ROW EXECUTE FUNCTION announce_stock()"
    )
    async with connection.transaction():
        await connection.execute("INSERT INTO stock VALUES ('nut', 1), ('bolt', 2)")
        await connection.execute("UPDATE stock SET pieces = pieces + 10 WHERE sku = 'nut'")
    await drained(connection)
    assert await stored_payloads(connection, "stock", "nut") == [
        {"sku": "nut", "pieces": 1},
        {"sku": "nut", "pieces": 11},
    ]


async def test_rows_that_cannot_be_cleaned_up_are_not_walked_over(
    api: Api, connection: Connection, connect: Connect
) -> None:
    """A transaction that lasts keeps PostgreSQL from removing what was appended since."""
    long = await connect()
    transaction = long.transaction()
    await transaction.start()
    await push(long, "last")
    await connection.execute("SELECT queen.push('q', 'many', to_jsonb(n)) FROM generate_series(1, 20000) n")
    await until(lambda: _count(connection, 20_000))
    # As autovacuum does after so many rows, sooner or later: plans are those of a table that it knows.
    await connection.execute("ANALYZE queen.inbox")
    walked = await index_entries_read(connection)
    for number in range(30):
        await push(connection, number)
        await until(partial(_is_stored, connection, number))
    assert await index_entries_read(connection) - walked < 200_000
    await transaction.commit()
    await drained(connection)
    assert await stored_payloads(connection) == [*range(30), "last"]


async def index_entries_read(connection: Connection) -> int:
    """After a while in which all sessions have reported theirs: they do within two seconds."""
    await asyncio.sleep(2.5)
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    read: int = await connection.fetchval(
        "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relname = 'inbox'"
    )
    return read
