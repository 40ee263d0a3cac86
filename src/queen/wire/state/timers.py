"""Operations on timers: the body of `POST /api/v1/timers`, and what transactions carry at `timers`."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from queen.errors import BadRequest
from queen.wire.decode import decoder, refusal
from queen.wire.fields import (
    Answer,
    Body,
    Count,
    Limit,
    Pagination,
    PrefixPage,
    Query,
    QueueFilter,
    Time,
    Uuid,
)
from queen.wire.push import DEFAULT_PARTITION, NameText, check_name

MOST_TIMERS: Final = 1000
LONGEST_KEY: Final = 255
BAD_REQUEST: Final = "timers_bad_request"

_MOST_PAYLOAD_BYTES: Final = 4 << 20
_LONGEST_DELAY: Final = 100 * 366 * 86_400_000
_any: Final = msgspec.json.Decoder()

TimerKey: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": LONGEST_KEY})]


class _Scheduled(Body):
    queue: NameText
    timer_key: TimerKey
    payload: Annotated[str, Meta(description="JSON in Base64.")]
    delay_ms: Annotated[int, Meta(ge=-_LONGEST_DELAY, le=_LONGEST_DELAY, description="From now; may be past.")]
    partition: NameText = DEFAULT_PARTITION
    txn: Annotated[str, Meta(description="The transaction id of the message; made by the server when absent.")] = ""
    payload_zstd: bool = False


class Schedule(_Scheduled, tag_field="op", tag="schedule"):
    """Push a message later; a timer of the same queue and key is replaced."""


class Reschedule(_Scheduled, tag_field="op", tag="reschedule"):
    """The same."""


class Cancel(Body, tag_field="op", tag="cancel"):
    """Push nothing. `txn` is answered where no timer is pending: it may have fired, and then names its message."""

    queue: NameText
    timer_key: TimerKey
    txn: str = ""


TimerOperation: TypeAlias = Schedule | Reschedule | Cancel


class TimerBody(Body):
    """Operations on different timers, done in one transaction."""

    operations: list[TimerOperation]


class TimerResult(Answer):
    """What came of one operation. `absent`: no such timer is pending, because it was cancelled, fired, or never was.

    `messageId` names the timer; the message that it pushes is known by its transaction id, `txn`.
    """

    index: Count
    ok: bool
    status: Literal["scheduled", "rescheduled", "cancelled", "absent"]
    queue: str
    timer_key: str
    txn: str | UnsetType | None = UNSET
    message_id: Uuid | UnsetType = UNSET
    deliver_at: Time | UnsetType = UNSET


class TimerAnswer(Answer):
    """One result for each operation, in order."""

    results: list[TimerResult]


class TimerRow(Answer):
    """A timer that is pending; `lastError` is why it could not be pushed when it was due."""

    timer_key: str
    message_id: Uuid
    partition: str
    txn: str
    deliver_at: Time
    scheduled_at: Time
    attempts: Count
    last_error: str | None


class TimerList(Answer):
    """Timers of a queue by key; `nextAfter` is the `after` of the next page."""

    rows: list[TimerRow]
    truncated: bool
    next_after: str | None


class PendingTimer(TimerRow):
    """A timer, and to which queue it pushes."""

    queue: str


class PendingTimers(Answer):
    """A page of the timers of all queues, the next to be due first. Where `total` is not `exact` there are more."""

    timers: list[PendingTimer]
    total: Count
    exact: bool
    pagination: Pagination


class TimerView(Answer):
    """A timer with its payload; `found` alone where none is pending."""

    found: bool
    queue: str | UnsetType = UNSET
    timer_key: str | UnsetType = UNSET
    message_id: Uuid | UnsetType = UNSET
    partition: str | UnsetType = UNSET
    txn: str | UnsetType = UNSET
    deliver_at: Time | UnsetType = UNSET
    payload: Raw | UnsetType = UNSET
    attempts: Count | UnsetType = UNSET
    last_error: str | UnsetType | None = UNSET


class TimersQuery(Query):
    """A page of timers."""

    after: Annotated[str, Meta(description="The last key of the page before.")] = ""
    limit: Limit = 100


class PendingTimersQuery(PrefixPage):
    """Which timers are listed."""

    queue: QueueFilter = ""


class CancelQuery(Query):
    """What is known of the timer."""

    txn: Annotated[str, Meta(description="Answered where no timer is pending.")] = ""


_body: Final = decoder(TimerBody)
_operations: Final = msgspec.json.Decoder(list[TimerOperation])


def decode_timers(body: bytes) -> list[TimerOperation]:
    """The operations of `POST /api/v1/timers`. Raises `BadRequest` that says which is wrong, and how."""
    try:
        operations: list[TimerOperation] = _body(body).operations
        _check(operations, "operations")
    except BadRequest as error:
        raise BadRequest(str(error), BAD_REQUEST) from error
    return operations


def decode_timer_riders(raw: Raw) -> list[TimerOperation]:
    """The operations at `timers` of a transaction."""
    try:
        operations = _operations.decode(raw)
        _check(operations, "timers")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(str(refusal(error, list[TimerOperation], "timers")), BAD_REQUEST) from error
    except BadRequest as error:
        raise BadRequest(str(error), BAD_REQUEST) from error
    return operations


def check_timer_key(key: str, where: str) -> None:
    """Raises `BadRequest` for what no timer can be called."""
    if not key or len(key) > LONGEST_KEY or not key.isprintable() or "/" in key:
        raise BadRequest(f"timerKey must be 1 to {LONGEST_KEY} printable characters other than '/' (at {where})")


def payload_of(operation: Schedule | Reschedule) -> bytes:
    """The payload of the message: JSON."""
    return b64decode(operation.payload)


def _check(operations: Sequence[TimerOperation], where: str) -> None:
    if len(operations) > MOST_TIMERS:
        raise BadRequest(f"a request has at most {MOST_TIMERS} timers, not {len(operations)}")
    named: set[tuple[str, str]] = set()
    for index, operation in enumerate(operations):
        at = f"{where}[{index}]"
        check_name(operation.queue, "Queue", f"{at}.queue")
        check_timer_key(operation.timer_key, f"{at}.timerKey")
        key = (operation.queue, operation.timer_key)
        if key in named:
            raise BadRequest(f"timer {operation.timer_key!r} is named twice (at {at}.timerKey)")
        named.add(key)
        if len(operation.txn) > 255:
            raise BadRequest(f"txn must be at most 255 characters (at {at}.txn)")
        if not isinstance(operation, Cancel):
            _check_message(operation, at)


def _check_message(operation: Schedule | Reschedule, at: str) -> None:
    check_name(operation.partition, "Partition", f"{at}.partition")
    if operation.payload_zstd:
        raise BadRequest(f"payloadZstd is not supported: send the payload as it is (at {at}.payloadZstd)")
    if len(operation.payload) > _MOST_PAYLOAD_BYTES:
        raise BadRequest(f"payload must have at most {_MOST_PAYLOAD_BYTES} characters (at {at}.payload)")
    try:
        payload: Any = b64decode(operation.payload, validate=True)
        _any.decode(payload)
    except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"payload must be JSON in Base64: {error} (at {at}.payload)") from error
