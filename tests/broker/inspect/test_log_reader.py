"""Reading whole logs through the server."""

from __future__ import annotations

from datetime import UTC, datetime

from queen.wire.envelope import Envelope
from queen.wire.ids import IdBlock
from queen.wire.segment import Segment, decode_frames
from tests.conftest import StartServer
from tests.support.ageing import Connection, age, clean
from tests.support.api import Api
from tests.support.raw_http import exchange

KEY = "0f" * 32
EPOCH = datetime.fromtimestamp(0, UTC)


async def test_a_queue_says_where_its_partitions_begin_and_end(api: Api, connection: Connection) -> None:
    await api.configure("orders", retentionEnabled=True, retentionSeconds=60)
    await api.push("orders", 0, 1)
    await age(connection, 100)
    await clean(api)
    await api.push("orders", 2, 3)
    await api.push("orders", 4, partition="a b")
    stored = await connection.fetchval("SELECT max(created_at) FROM queen.segments")

    answer = await api.call("GET", "/api/v1/read/orders", at=stored.isoformat())

    assert answer.body["queue"] == "orders"
    partitions = answer.body["partitions"]
    assert [(one["partition"], one["firstOffset"], one["nextOffset"], one["offsetAt"]) for one in partitions] == [
        ("Default", 2, 4, 4),
        ("a b", 0, 1, 0),
    ]
    without = await api.call("GET", "/api/v1/read/orders")
    assert {one["offsetAt"] for one in without.body["partitions"]} == {None}
    await api.configure("empty")
    assert all(one["nextOffset"] == 0 for one in (await api.call("GET", "/api/v1/read/empty")).body["partitions"])


async def test_messages_are_handed_out_as_they_are_stored_and_stay(start_server: StartServer) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True)
    await api.push("vault", 0, 1, 2)
    await api.push("vault", 3)

    assert await payloads(api, "from=1&to=2") == ["0", "1", "2"]
    assert await payloads(api, "") == ["0", "1", "2", "3"]
    assert await payloads(api, "from=4") == []
    assert [message["data"] for message in await api.pop("vault", batch=10)] == [0, 1, 2, 3]


async def payloads(api: Api, query: str) -> list[str]:
    """What is answered, without a key: the server has opened what was encrypted."""
    status, body = await exchange(api.url, "GET", f"/api/v1/read/vault/partition/Default?{query}")
    assert status == 200
    found = []
    for frame in decode_frames(body):
        segment = Segment(frame.base_offset, EPOCH, IdBlock.parse(frame.first_id), Envelope().open(frame.body))
        assert segment.count == frame.messages
        found += [segment.payload(index).decode() for index in range(segment.count)]
    return found
