"""Streaming queries: request bodies and responses; values of state and payloads are left as they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from queen.errors import BadRequest
from queen.wire.ack import decode_object, optional_str
from queen.wire.api.messages.messaging import PushResult
from queen.wire.decode import decode_fields, refusal
from queen.wire.fields import Count, SnakeAnswer, Time, Uuid
from queen.wire.push import LooseItem, NameText, PushItem, check_name, check_utf8, read_items

LONGEST_KEY = 2000
"""In bytes; a row of an index holds little more."""
_LONGEST_HASH = 255
_EMPTY = msgspec.Raw(b"{}")
_UuidText: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]


class Registration(msgspec.Struct, frozen=True):
    """A query: its lasting name, what it reads, and a fingerprint of its operators."""

    name: NameText
    source_queue: NameText
    config_hash: Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": _LONGEST_HASH})]
    sink_queue: NameText | None = None
    reset: Annotated[bool, Meta(description="Drop the state if the fingerprint is another.")] = False


@dataclass(frozen=True, slots=True)
class StateOperation:
    """`value` is None for a delete. `version` is what the key must still be at (None: absent) if `guarded`."""

    key: str
    value: msgspec.Raw | None
    guarded: bool
    version: int | None


@dataclass(frozen=True, slots=True)
class CycleAck:
    transaction_id: str
    lease_id: str
    status: str
    count: int
    error: str


@dataclass(frozen=True, slots=True)
class Cycle:
    """`refusal` says why the cycle, though well-formed, cannot be carried out."""

    query_id: str
    partition_id: str
    group: str | None
    config_hash: str | None
    state: list[StateOperation]
    items: list[PushItem]
    ack: CycleAck | None
    release_lease: bool
    refusal: str = ""


class StateQuery(msgspec.Struct, frozen=True):
    """Which state is requested; filters that are given must all match."""

    query_id: _UuidText
    partition_id: _UuidText
    keys: Annotated[list[str] | None, Meta(description="Only these; all of them when empty.")] = None
    key_prefix: str | None = None
    ripe_at_or_before: Annotated[
        float | None, Meta(description="Only values whose `windowEnd`, in epoch milliseconds, is no later.")
    ] = None
    after: Annotated[str | None, Meta(description="Read on after this key.")] = None
    limit: Annotated[int, Meta(ge=1, description="Read a page of at most so many.")] | None = None


class _Window(msgspec.Struct):
    window_end: Any = msgspec.field(default=None, name="windowEnd")


class StateOp(msgspec.Struct, forbid_unknown_fields=True):
    """Write (`upsert`) or remove (`delete`) the state of a key; without a value it is `{}`."""

    type: Annotated[Any, Meta(extra_json_schema={"enum": ["upsert", "delete"]})] = None
    key: Annotated[Any, Meta(extra_json_schema={"type": "string", "maxLength": LONGEST_KEY})] = None
    value: msgspec.Raw = msgspec.field(default_factory=lambda: _EMPTY)
    if_version: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": ["integer", "null"],
                "description": "The version that the key must still have; null: it must have no state.",
            }
        ),
    ] = msgspec.UNSET


class AckOfCycle(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The last message that was read, and how many were."""

    transaction_id: Any = None
    lease_id: Any = None
    status: Annotated[Any, Meta(extra_json_schema={"enum": ["completed", "success", "failed", "dlq", None]})] = None
    count: Any = 1
    error: Any = None


class CycleBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a query made of the messages of one partition."""

    query_id: Annotated[Any, Meta(extra_json_schema={"type": "string", "format": "uuid"})] = None
    partition_id: Annotated[Any, Meta(extra_json_schema={"type": "string", "format": "uuid"})] = None
    consumer_group: Annotated[Any, Meta(extra_json_schema={"type": ["string", "null"]})] = None
    config_hash: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": ["string", "null"],
                "description": "Refuse the cycle when the query has another fingerprint by now.",
            }
        ),
    ] = None
    state_ops: list[StateOp] | None = None
    push_items: list[LooseItem] | None = None
    ack: AckOfCycle | None = None
    release_lease: Annotated[
        Any,
        Meta(
            extra_json_schema={
                "type": "boolean",
                "description": "False: the lease stays, and what was not acknowledged comes again when it expires.",
            }
        ),
    ] = True


_cycle = msgspec.json.Decoder(CycleBody)
_window = msgspec.json.Decoder(_Window)


def decode_registration(body: bytes) -> Registration:
    """The body of `POST /streams/v1/queries`. Raises `BadRequest` that says what is wrong."""
    value = decode_fields(body, Registration)
    name, source, config_hash = (_required(value, key) for key in ("name", "source_queue", "config_hash"))
    check_name(name, "Name", "name")
    check_name(source, "Queue", "source_queue")
    if len(config_hash) > _LONGEST_HASH or not config_hash.isprintable():
        raise BadRequest(f"config_hash must be at most {_LONGEST_HASH} printable characters")
    sink = optional_str(value, "sink_queue") or None
    if sink is not None:
        check_name(sink, "Queue", "sink_queue")
    return Registration(name, source, config_hash, sink, value.get("reset") is True)


def decode_cycle(body: bytes) -> Cycle:
    """The body of `POST /streams/v1/cycle`. Raises `BadRequest` that says what is wrong, and where."""
    check_utf8(body)
    try:
        cycle = _cycle.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _explain(body, error) from error
    for value, key in ((cycle.query_id, "query_id"), (cycle.partition_id, "partition_id")):
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{key} is required")
    group = cycle.consumer_group if isinstance(cycle.consumer_group, str) and cycle.consumer_group else None
    if group is not None:
        check_name(group, "ConsumerGroup", "consumer_group")
    state, unknown = _state(cycle.state_ops or [])
    ack, incomplete = _ack(cycle.ack)
    return Cycle(
        cycle.query_id,
        cycle.partition_id,
        group,
        cycle.config_hash if isinstance(cycle.config_hash, str) else None,
        state,
        read_items(cycle.push_items or [], "push_items"),
        ack,
        cycle.release_lease is not False,
        unknown or incomplete,
    )


def decode_state_query(body: bytes) -> StateQuery:
    """The body of `POST /streams/v1/state/get`. Raises `BadRequest` that says what is wrong."""
    value = decode_fields(body, StateQuery)
    query_id, partition_id = _required(value, "query_id"), _required(value, "partition_id")
    keys = value.get("keys")
    if isinstance(keys, list):
        for index, key in enumerate(keys):
            if not isinstance(key, str):
                raise BadRequest(f"Each key must be a string (at keys[{index}])")
    ripe = value.get("ripe_at_or_before")
    if ripe is not None and not _is_number(ripe):
        raise BadRequest("ripe_at_or_before must be a number of milliseconds")
    limit = value.get("limit")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise BadRequest("limit must be a whole number above 0")
    return StateQuery(
        query_id,
        partition_id,
        keys if isinstance(keys, list) and keys else None,
        optional_str(value, "key_prefix") or None,
        float(ripe) if ripe is not None else None,
        optional_str(value, "after"),
        limit,
    )


def window_end(value: msgspec.Raw) -> float | None:
    """The number at `windowEnd` of a value, if there is one."""
    try:
        end = _window.decode(value).window_end
    except msgspec.DecodeError:
        return None
    return float(end) if _is_number(end) else None


def _required(value: dict[str, Any], key: str) -> str:
    found = optional_str(value, key)
    if not found:
        raise BadRequest(f"{key} is required")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _state(operations: list[StateOp]) -> tuple[list[StateOperation], str]:
    """The operations, and what is wrong with the first of a type that does not exist."""
    read = []
    for index, operation in enumerate(operations):
        where = f"state_ops[{index}]"
        if operation.type not in ("upsert", "delete"):
            return [], f"Unknown state_op type: {operation.type}"
        key = operation.key
        if not isinstance(key, str):
            raise BadRequest(f"key must be a string (at {where}.key)")
        if len(key) > LONGEST_KEY or not (key.isascii() or len(key.encode()) <= LONGEST_KEY):
            raise BadRequest(f"key must be at most {LONGEST_KEY} bytes (at {where}.key)")
        if "\x00" in key:
            raise BadRequest(f"key must not contain a NUL character (at {where}.key)")
        guarded = operation.if_version is not msgspec.UNSET
        version = operation.if_version if guarded else None
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise BadRequest(f"if_version must be a whole number or null (at {where}.if_version)")
        read.append(StateOperation(key, operation.value if operation.type == "upsert" else None, guarded, version))
    return read, ""


def _ack(sent: AckOfCycle | None) -> tuple[CycleAck | None, str]:
    """The acknowledgment, and what is missing from it."""
    if sent is None:
        return None, ""
    if not isinstance(sent.transaction_id, str) or not sent.transaction_id:
        return None, "ack.transactionId is required"
    count = sent.count
    return CycleAck(
        sent.transaction_id,
        sent.lease_id if isinstance(sent.lease_id, str) else "",
        sent.status if isinstance(sent.status, str) and sent.status else "completed",
        count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1,
        sent.error if isinstance(sent.error, str) else "",
    ), ""


def _explain(body: bytes, error: Exception) -> BadRequest:
    """Find what the decoder refused."""
    value = decode_object(body)
    if value.get("ack") is not None and not isinstance(value["ack"], dict):
        return BadRequest("ack must be an object or null (at ack)")
    for key in ("state_ops", "push_items"):
        entries = value.get(key)
        if entries is None:
            continue
        if not isinstance(entries, list):
            return BadRequest(f"{key} must be an array")
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                return BadRequest(f"Each of {key} must be an object (at {key}[{index}])")
    return refusal(error, CycleBody)


class StreamPartition(SnakeAnswer):
    """A partition for which a query keeps state."""

    partition_id: Uuid
    partition: str


class RegisteredStream(SnakeAnswer):
    """A registered query; `reset` says whether state was dropped."""

    success: bool
    query_id: Uuid
    name: str
    config_hash: str
    fresh: bool
    reset: bool
    partitions: list[StreamPartition]


class StreamQuery(SnakeAnswer):
    """A query as it was registered last."""

    query_id: Uuid
    name: str
    source_queue: str
    sink_queue: str | None
    config_hash: str
    created_at: Time
    updated_at: Time


class StreamDeleted(SnakeAnswer):
    """A query that is forgotten, and how many rows of state with it."""

    success: bool
    name: str
    state_rows: Count


class StreamConflict(SnakeAnswer):
    """The query is registered with other operators."""

    success: bool
    query_id: Uuid
    name: str
    error: str


class StreamAckResult(SnakeAnswer):
    """What became of the acknowledgment."""

    success: bool
    count: Count
    lease_released: bool
    dlq: bool


class StreamCycleResult(SnakeAnswer):
    """Whether the cycle happened; if not, `error` says why, and nothing of it did.

    `replayed`: it had happened before, and nothing was done again.
    """

    success: bool
    query_id: str
    partition_id: str
    queue_name: str | None = field(name="queueName")
    state_ops_applied: Count
    push_results: list[PushResult]
    ack_result: StreamAckResult | None
    replayed: bool | UnsetType = UNSET
    error: str | UnsetType = UNSET


class StateRow(SnakeAnswer):
    """The state of a key; its version is another after every write."""

    key: str
    value: Any
    updated_at: str
    version: int


class StreamState(SnakeAnswer):
    """State by key; `more` when a limit cut it off."""

    success: bool
    rows: list[StateRow]
    more: bool | UnsetType = UNSET
