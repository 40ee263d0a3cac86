"""From rows to what is staged: messages of queues, or items of topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa

from queen.chunks import chunks
from queen.errors import BadRequest, SettingsError
from queen.spark.options import WriteOptions
from queen.spark.sink.publishers import TopicKey
from queen.wire.push import DEFAULT_PARTITION, LONGEST_NAME, NULL, PushItem, check_items
from queen.wire.topics.requests import decode_enqueue_items

ITEMS_AT_ONCE: Final = 5000
_PAYLOAD: Final = "payload"
_OF_MESSAGES: Final = ("queue", "partition", "transaction_id", "trace_id")
_OF_ITEMS: Final = ("namespace", "topic", "idempotency_key", "priority", "metadata", "deliver_after", "delay", "ttl")
# Columns that a read of queues has, and that every message gets when it is stored.
_READ_ONLY: Final = ("offset", "message_id", "created_at", "producer_sub")


_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_encoder = msgspec.json.Encoder(decimal_format="number")


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What becomes of each column. `packed`: the columns of the payload, where no column is the payload."""

    options: WriteOptions
    to_topics: bool
    columns: frozenset[str]
    packed: tuple[str, ...]


def plan_rows(options: WriteOptions, columns: Sequence[str]) -> RowPlan:
    """Raises `SettingsError` when rows do not say where they go, or something of them would be lost."""
    to_topics = _goes_to_topics(options, columns)
    own = _OF_ITEMS if to_topics else _OF_MESSAGES
    others = tuple(name for name in columns if name not in own and name != _PAYLOAD)
    if _PAYLOAD not in columns:
        if not others:
            raise SettingsError("rows have nothing to send: give them a column payload, or columns to make it of")
        return RowPlan(options, to_topics, frozenset(columns), others)
    lost = [name for name in others if name not in _READ_ONLY and name not in _OF_MESSAGES]
    if lost:
        raise SettingsError(
            f"columns {', '.join(lost)} would be lost beside the column payload: drop them, or put them into it"
        )
    return RowPlan(options, to_topics, frozenset(columns), ())


def _goes_to_topics(options: WriteOptions, columns: Sequence[str]) -> bool:
    if options.queue is not None:
        return False
    if options.topic is not None or options.namespace is not None or ("topic" in columns and "queue" not in columns):
        for name, given in (("namespace", options.namespace), ("topic", options.topic)):
            if given is None and name not in columns:
                raise SettingsError(f'items need a {name}: option("{name}", ...) or a column {name}')
        return True
    if "queue" not in columns:
        raise SettingsError(
            'say where rows go: option("queue", "orders") or a column queue; or, for topics, namespace and topic'
        )
    if "topic" in columns:
        raise SettingsError("rows have a column queue and a column topic: give option queue or topic, or drop one")
    return False


def messages(plan: RowPlan, batch: pa.RecordBatch) -> list[PushItem]:
    """The messages of rows, each one valid. Raises `BadRequest` that says which is wrong, and how."""
    options = plan.options
    queues = _texts(plan, batch, "queue", options.queue, None)
    partitions = _texts(plan, batch, "partition", options.partition, DEFAULT_PARTITION)
    ids = _texts(plan, batch, "transaction_id", None, "")
    traces = _texts(plan, batch, "trace_id", None, "")
    items = [
        PushItem(queue, partition, payload, id, trace)
        for queue, partition, payload, id, trace in zip(
            queues, partitions, payloads(plan, batch), ids, traces, strict=True
        )
    ]
    names = {*queues, *partitions}
    if any(traces) or max(map(len, ids), default=0) > LONGEST_NAME or not all(map(_is_good_name, names)):
        check_items(items, "rows")
    return items


def items(plan: RowPlan, batch: pa.RecordBatch) -> Iterator[tuple[TopicKey, bytes, int]]:
    """The items of rows, each one valid: topic by topic, as JSON arrays of some of them."""
    columns: dict[str, Sequence[Any]] = {
        "namespace": _texts(plan, batch, "namespace", plan.options.namespace, None),
        "topic": _texts(plan, batch, "topic", plan.options.topic, None),
    }
    for name in _OF_ITEMS[2:]:
        if name in plan.columns:
            columns[name] = _values(batch.column(name), parse=name == "metadata")
    if _PAYLOAD in plan.columns and pa.types.is_binary(batch.schema.field(_PAYLOAD).type):
        columns[_PAYLOAD] = batch.column(_PAYLOAD).to_pylist()
    else:
        columns["data"] = payloads(plan, batch)
    names = list(columns)
    by_topic: dict[TopicKey, list[dict[str, Any]]] = {}
    for row in zip(*columns.values(), strict=True):
        item = {name: value for name, value in zip(names, row, strict=True) if value is not None}
        by_topic.setdefault((item["namespace"], item["topic"]), []).append(item)
    for topic, made in by_topic.items():
        for some in chunks(made, ITEMS_AT_ONCE):
            array = _encoder.encode(some)
            decode_enqueue_items(array, "rows")
            yield topic, array, len(some)


def payloads(plan: RowPlan, batch: pa.RecordBatch) -> list[msgspec.Raw]:
    """The payload of each row as JSON: what its column holds, or an object of columns."""
    if plan.packed:
        return [msgspec.Raw(_encoder.encode(row)) for row in _plain(batch.select(list(plan.packed)))]
    column = batch.column(_PAYLOAD)
    if not _is_text(column.type):
        return [msgspec.Raw(_encoder.encode(value)) for value in column.to_pylist(maps_as_pydicts="strict")]
    texts: list[bytes | None] = column.cast(pa.large_binary() if _is_large(column.type) else pa.binary()).to_pylist()
    try:
        return [NULL if text is None else _check_json(text) for text in texts]
    except (msgspec.DecodeError, RecursionError):
        raise _first_bad(texts) from None


def _is_good_name(name: str) -> bool:
    return 0 < len(name) <= LONGEST_NAME and name.isprintable()


def _first_bad(texts: Sequence[bytes | None]) -> BadRequest:
    for index, text in enumerate(texts):
        try:
            _check_json(b"null" if text is None else text)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = (text or b"")[:100].decode(errors="replace")
            return BadRequest(
                f"rows[{index}].payload is not JSON: {error}: {shown!r}. Make JSON of it, with to_json for instance"
            )
    raise AssertionError("one of them was refused")


def _texts(plan: RowPlan, batch: pa.RecordBatch, name: str, given: str | None, otherwise: str | None) -> list[str]:
    """A column of names: what the option says for all rows, else what the column says; null where that is allowed."""
    if given is not None or name not in plan.columns:
        return [given if given is not None else otherwise or ""] * batch.num_rows
    column = batch.column(name)
    if not _is_text(column.type):
        column = column.cast(pa.string())
    values: list[str | None] = column.to_pylist()
    if not column.null_count:
        return [value for value in values if value is not None]
    if otherwise is None:
        raise BadRequest(f"rows[{values.index(None)}].{name} is null, and there is no option {name}")
    return [otherwise if value is None else value for value in values]


def _values(column: pa.Array, *, parse: bool) -> list[Any]:
    """Values as they are; `parse` takes text for JSON."""
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    if not parse or not _is_text(column.type):
        return values
    try:
        return [None if value is None else _check_json(value.encode()) for value in values]
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"metadata must be a JSON object, and is not JSON in one of the rows: {error}") from error


def _plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    return rows


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large(kind))


def _is_large(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))
