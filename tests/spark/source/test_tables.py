"""What can be read beside messages."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from queen.errors import QueenError
from queen.spark.options import parse_read_options
from queen.spark.schemas import schema_of
from queen.spark.source.tables import TableReader
from tests.conftest import StartServer
from tests.spark.conftest import Read, collect
from tests.support.api import Api
from tests.support.topic_api import TopicApi, item

KEY = "0f" * 32


async def test_dead_letters_traces_and_lags_are_tables(start_server: StartServer, read: Read) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True, retryLimit=0)
    await api.push("vault", {"card": 1}, 2, 3, ids=["a", "b", "c"])
    await api.push("orders", 4)
    (message,) = await api.pop("vault", consumerGroup="pay")
    named = {"transactionId": message["transactionId"], "partitionId": message["partitionId"]}
    trace = named | {"traceNames": ["checkout"], "data": {"text": "hi"}, "consumerGroup": "pay", "eventType": "info"}
    assert (await api.call("POST", "/api/v1/traces", trace)).status == 201
    assert (await api.ack([message], "failed", group="pay", error="no funds"))[0]["dlq"]
    await api.pop("orders", consumerGroup="ship")

    (letter,) = await collect(lambda: read("vault", table="dlq", encryptionKey=KEY))
    (told,) = await collect(lambda: read(what="traces", encryptionKey=KEY))
    lags = await collect(lambda: read(table="lag").orderBy("group"))

    assert (letter.queue, letter.partition, letter.offset, letter.transaction_id) == ("vault", "Default", 0, "a")
    assert (letter.group, letter.error, letter.payload) == ("pay", "no funds", '{"card": 1}')
    assert letter.message_id == message["id"]
    assert letter.failed_at >= letter.created_at
    assert (told.queue, told.offset, told.names, told.group, told.data) == (
        "vault",
        0,
        ["checkout"],
        "pay",
        '{"text": "hi"}',
    )
    assert [(row.group, row.queue, row.partition, row.lag, row.leased) for row in lags] == [
        ("pay", "vault", "Default", 2, False),
        ("ship", "orders", "Default", 1, True),
    ]


async def test_items_of_topics_are_a_table(api: Api, read: Read) -> None:
    topics = TopicApi(api)
    await topics.enqueue(item({"n": 1}, topic="mail"), item({"n": 2}, topic="mail"), item({"n": 3}, topic="sms"))
    await topics.dequeue(1, topic="mail")

    rows = await collect(lambda: read(table="topic", topic="mail").orderBy("id"))
    with pytest.raises(PySparkException, match="no topic 'post'"):
        await collect(lambda: read(table="topic", topic="post"))

    assert [(row.topic, row.payload, row.is_json) for row in rows] == [
        ("mail", '{"n": 1}', True),
        ("mail", '{"n": 2}', True),
    ]
    assert sorted(row.status for row in rows) == ["leased", "ready"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "dlq", "queue": "ordrs"}, "no queue ordrs"),
        ({"table": "lag", "columns": "lagg"}, "lagg"),
    ],
)
async def test_what_is_not_there_is_said(options: dict[str, str], said: str, dsn: str) -> None:
    parsed = parse_read_options({"databaseUrls": dsn} | options, {})
    with pytest.raises(QueenError, match=said):
        schema = schema_of(parsed)
        assert isinstance(schema, StructType)
        TableReader(parsed, schema).partitions()
