"""Rows become messages and items, or it is said which one cannot, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from queen.errors import BadRequest, SettingsError
from queen.spark.options import parse_write_options
from queen.spark.sink.rows import RowPlan, items, messages, plan_rows

URL = "postgresql://localhost/queen"
TRACE = "6f1b9a52-0d52-4c84-9d0c-6a2f5f0b7d11"


def planned(columns: dict[str, Any], **options: str) -> tuple[RowPlan, pa.RecordBatch]:
    batch = pa.record_batch(columns)
    return plan_rows(parse_write_options({"databaseUrls": URL} | options, {}), batch.schema.names), batch


def made(columns: dict[str, Any], **options: str) -> list[tuple[str, str, Any, str, str]]:
    return [
        (item.queue, item.partition, msgspec.json.decode(item.payload), item.transaction_id, item.trace_id)
        for item in messages(*planned(columns, **options))
    ]


def test_options_win_over_columns_and_nulls_get_the_default() -> None:
    columns = {"queue": ["a", "b"], "partition": ["x", None], "payload": ["1", None], "transaction_id": ["t", None]}
    assert made(columns) == [("a", "x", 1, "t", ""), ("b", "Default", None, "", "")]
    assert made(columns, queue="q", partition="p") == [("q", "p", 1, "t", ""), ("q", "p", None, "", "")]


def test_a_payload_is_kept_as_it_is_written() -> None:
    (item,) = messages(*planned({"payload": ['{"b" : 1.50, "a": "\u00e9"}']}, queue="q"))
    assert bytes(item.payload) == '{"b" : 1.50, "a": "\u00e9"}'.encode()


def test_a_payload_of_any_type_becomes_json() -> None:
    assert [one[2] for one in made({"payload": [{"a": [1, None]}]}, queue="q")] == [{"a": [1, None]}]
    maps = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32()))
    assert [one[2] for one in made({"payload": maps}, queue="q")] == [{"k": 1}]
    assert [one[2] for one in made({"payload": [b'{"a": 1}']}, queue="q")] == [{"a": 1}]
    assert [one[2] for one in made({"payload": pa.array(["[1]"], pa.large_string())}, queue="q")] == [[1]]


def test_columns_that_are_no_part_of_a_message_become_its_payload() -> None:
    columns = {
        "partition": ["p"],
        "trace_id": [TRACE],
        "price": [Decimal("1.50")],
        "at": [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)],
        "ratio": [float("nan")],
        "offset": [7],
    }
    ((_, partition, payload, _, trace),) = made(columns, queue="q")
    assert (partition, trace) == ("p", TRACE)
    assert payload == {"price": 1.5, "at": "2026-01-02T03:04:05Z", "ratio": None, "offset": 7}


def test_a_number_can_name_a_partition() -> None:
    assert [one[1] for one in made({"partition": [1, 20], "payload": ["1", "2"]}, queue="q")] == ["1", "20"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"payload": ["1", "{"]}, r"rows\[1\].payload is not JSON.*to_json"),
        ({"payload": ["1", "1,2"]}, r"rows\[1\].payload is not JSON"),
        ({"payload": ["1", ""]}, r"rows\[1\].payload is not JSON"),
        ({"payload": ["1", "1"], "queue": ["q", None]}, r"rows\[1\].queue is null"),
        ({"payload": ["1", "1"], "queue": ["q", ""]}, r"rows\[1\].queue"),
        ({"payload": ["1", "1"], "queue": ["q", "x" * 256]}, r"rows\[1\].queue"),
        ({"payload": ["1", "1"], "queue": ["q", "q"], "partition": ["p", "a\n"]}, r"rows\[1\].partition"),
        ({"payload": ["1", "1"], "queue": ["q", "q"], "transaction_id": ["t", "x" * 256]}, r"rows\[1\].transactionId"),
        ({"payload": ["1", "1"], "queue": ["q", "q"], "trace_id": [None, "no uuid"]}, r"rows\[1\].traceId"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_named(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        made(columns, **({} if "queue" in columns else {"queue": "q"}))


def test_items_are_grouped_by_topic_in_their_order() -> None:
    columns = {
        "topic": ["a", "b", "a"],
        "payload": ["1", "2", "3"],
        "priority": [1, None, 3],
        "metadata": ['{"k": 1}', None, None],
    }
    arrays = [
        (topic, msgspec.json.decode(array), count) for topic, array, count in items(*planned(columns, namespace="n"))
    ]
    assert arrays == [
        (
            ("n", "a"),
            [
                {"namespace": "n", "topic": "a", "priority": 1, "metadata": {"k": 1}, "data": 1},
                {"namespace": "n", "topic": "a", "priority": 3, "data": 3},
            ],
            2,
        ),
        (("n", "b"), [{"namespace": "n", "topic": "b", "data": 2}], 1),
    ]


def test_bytes_are_the_payload_of_an_item_and_many_items_are_several_arrays() -> None:
    found = list(items(*planned({"payload": [b"\x00"] * 12_000}, namespace="n", topic="t")))
    assert [count for _, _, count in found] == [5000, 5000, 2000]
    assert msgspec.json.decode(found[0][1])[0]["payload"] == "AA=="


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"payload": ["1"], "metadata": ["[]"]}, "metadata must be a JSON object"),
        ({"payload": ["1"], "metadata": ["{"]}, "metadata must be a JSON object"),
        ({"payload": ["1"], "priority": [1 << 31]}, "priority"),
        ({"payload": ["1"], "idempotency_key": ["x" * 256]}, "idempotency_key"),
    ],
)
def test_a_row_that_cannot_be_an_item_is_refused(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        list(items(*planned(columns, namespace="n", topic="t")))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "a\nb"}, "option queue"),
        ({"queue": "q", "run": "r", "batch": "-1"}, "batch must be a whole number"),
        ({"queue": "q", "dedupWindowSeconds": "soon"}, "dedupWindowSeconds must be"),
        ({"queue": "q", "databaseUrls": "mysql://localhost"}, "databaseUrls must be"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_write_options({"databaseUrls": URL} | options, {})
