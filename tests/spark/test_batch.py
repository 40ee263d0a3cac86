"""Reading queues in one go."""

from __future__ import annotations

from tests.api import Api
from tests.spark.conftest import Read, collect


async def test_a_queue_is_read_whole_with_all_its_columns(api: Api, read: Read) -> None:
    await api.push("orders", {"n": 0}, {"n": 1}, ids=["a", 'b"\u00e9'])
    await api.push("orders", {"n": 2}, partition="eu", ids=["c"])
    popped = [*await api.pop("orders", "Default", batch=10), *await api.pop("orders", "eu", batch=10)]

    rows = await collect(lambda: read("orders").orderBy("partition", "offset"))

    assert [(row.queue, row.partition, row.offset, row.payload) for row in rows] == [
        ("orders", "Default", 0, '{"n": 0}'),
        ("orders", "Default", 1, '{"n": 1}'),
        ("orders", "eu", 0, '{"n": 2}'),
    ]
    assert [row.transaction_id for row in rows] == ["a", 'b"\u00e9', "c"]
    assert [row.message_id for row in rows] == [message["id"] for message in popped]
    assert all(row.trace_id is None and row.producer_sub is None for row in rows)
