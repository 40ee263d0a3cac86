"""Operations on keys and values: the bodies of `POST /api/v1/kv`, and what transactions carry at `kv`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from queen.errors import BadRequest
from queen.wire.decode import decoder, refusal
from queen.wire.fields import LARGEST_BIGINT, Answer, Body, Count, Page, Pagination, Search, Time
from queen.wire.push import check_utf8

MOST_OPERATIONS: Final = 1000
MOST_KEYS: Final = 1000
LONGEST_KEY: Final = 512
MOST_VALUE_BYTES: Final = 1 << 20
MOST_ON_A_PAGE: Final = 1000
BAD_REQUEST: Final = "kv_bad_request"

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_LONGEST_TTL: Final = 100 * 366 * 86_400

Ns: TypeAlias = Annotated[str, Meta(extra_json_schema={"pattern": f"^{_NAMESPACE.pattern}$"})]
Key: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": LONGEST_KEY})]
_Ttl: TypeAlias = Annotated[int, Meta(ge=1, le=_LONGEST_TTL)]
_Expect: TypeAlias = Annotated[int, Meta(ge=0, le=LARGEST_BIGINT, description="The version; 0: it must not exist.")]


class KvGet(Body, tag_field="op", tag="get"):
    """Read a key."""

    ns: Ns
    key: Key


class KvGetMany(Body, tag_field="op", tag="getMany"):
    """Read keys."""

    ns: Ns
    keys: list[Key]


class KvGetPrefix(Body, tag_field="op", tag="getPrefix"):
    """Read a page of the keys that start with a text, in order; not in a transaction."""

    ns: Ns
    prefix: Key
    after: Annotated[str, Meta(description="The last key of the page before.")] = ""
    limit: int = 100
    keys_only: bool = False


class KvPut(Body, tag_field="op", tag="put"):
    """Write a key; with `expect` only where it has this version."""

    ns: Ns
    key: Key
    value: Raw
    ttl_seconds: _Ttl | UnsetType = UNSET
    forever: bool = False
    expect: _Expect | UnsetType = UNSET
    required: bool = False


class KvPutIfAbsent(Body, tag_field="op", tag="putIfAbsent"):
    """Write a key unless it exists."""

    ns: Ns
    key: Key
    value: Raw
    ttl_seconds: _Ttl | UnsetType = UNSET
    forever: bool = False
    required: bool = False


class KvDelete(Body, tag_field="op", tag="delete"):
    """Delete a key; with `expect` only where it has this version."""

    ns: Ns
    key: Key
    expect: _Expect | UnsetType = UNSET
    required: bool = False


class KvIncr(Body, tag_field="op", tag="incr"):
    """Add to a number, which begins at 0, unless it would leave [`min`, `max`]. Only a new key takes the expiry."""

    ns: Ns
    key: Key
    delta: int | float = 1
    min: int | float | None = None
    max: int | float | None = None
    ttl_seconds: _Ttl | UnsetType = UNSET
    forever: bool = False
    required: bool = False


class KvCheck(Body, tag_field="op", tag="check"):
    """Whether a key has a version; writes nothing."""

    ns: Ns
    key: Key
    expect: _Expect
    required: bool = False


KvWrite: TypeAlias = KvPut | KvPutIfAbsent | KvDelete | KvIncr
KvOperation: TypeAlias = KvGet | KvGetMany | KvGetPrefix | KvWrite | KvCheck
KvReason: TypeAlias = Literal["version", "absent", "exists", "limit", "type", "rolledBack"]


class KvBody(Body):
    """Operations on keys, done in order and in one transaction."""

    operations: list[KvOperation]


class KvRow(Answer):
    """A key and its value; with `keysOnly` without the value."""

    key: str
    version: Count
    expires_at: Time | None
    updated_at: Time
    value: Raw | UnsetType = UNSET


class KvResult(Answer):
    """What came of one operation.

    Reads of a key are `found` or not. Writes and checks are `applied` or not, with the `reason`; `value` and `version`
    are those that the key has then (0: it does not exist). An operation that is `required` and not applied undoes all
    others: those are answered with the reason `rolledBack`.
    """

    index: Count
    key: str | UnsetType = UNSET
    found: bool | UnsetType = UNSET
    applied: bool | UnsetType = UNSET
    reason: KvReason | UnsetType = UNSET
    value: Raw | UnsetType = UNSET
    version: Count | UnsetType = UNSET
    expires_at: Time | UnsetType | None = UNSET
    updated_at: Time | UnsetType = UNSET
    rows: list[KvRow] | UnsetType = UNSET
    missing: list[str] | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    next_after: str | UnsetType | None = UNSET


class KvAnswer(Answer):
    """One result for each operation, in order; `success` is false where a required one was not applied."""

    success: bool
    results: list[KvResult]
    reason: Literal["kv_precondition"] | UnsetType = UNSET
    failed_index: Count | UnsetType = UNSET


class KvNamespace(Answer):
    """A namespace and how many keys it has; more than 1000 are not counted."""

    namespace: str
    keys: Count


class KvNamespaces(Answer):
    """A page of the namespaces that have keys, by name; that of locks is not among them."""

    namespaces: list[KvNamespace]
    total: Count
    pagination: Pagination


class KvNamespacesQuery(Page):
    """Which namespaces are listed."""

    search: Search = ""


class KvListed(KvRow, kw_only=True):
    """A key in a list; a `value` of more than 1 kB is left out."""

    bytes: Count


class KvList(Answer):
    """A page of the keys of a namespace, in order. Where `total` is not `exact` there are more."""

    keys: list[KvListed]
    total: Count
    exact: bool
    pagination: Pagination


_body: Final = decoder(KvBody)
_operations: Final = msgspec.json.Decoder(list[KvOperation])


def decode_kv(body: bytes) -> list[KvOperation]:
    """The operations of `POST /api/v1/kv`. Raises `BadRequest` that says which is wrong, and how."""
    try:
        operations: list[KvOperation] = _body(body).operations
        check_utf8(body)
        if len(operations) > MOST_OPERATIONS:
            raise BadRequest(f"a request has at most {MOST_OPERATIONS} operations, not {len(operations)}")
        for index, operation in enumerate(operations):
            check_operation(operation, f"operations[{index}]")
    except BadRequest as error:
        raise BadRequest(str(error), error.code or BAD_REQUEST) from error
    return operations


def decode_riders(raw: Raw) -> list[KvOperation]:
    """The operations at `kv` of a transaction."""
    try:
        operations = _operations.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(str(refusal(error, list[KvOperation], "kv")), BAD_REQUEST) from error
    if len(operations) > MOST_OPERATIONS:
        raise BadRequest(f"a transaction has at most {MOST_OPERATIONS} operations at kv", BAD_REQUEST)
    for index, operation in enumerate(operations):
        if isinstance(operation, KvGetPrefix):
            raise BadRequest(
                f"getPrefix cannot be part of a transaction: read single keys (at kv[{index}])", BAD_REQUEST
            )
        check_operation(operation, f"kv[{index}]")
    return operations


def check_operation(operation: KvOperation, where: str) -> None:
    """Raises `BadRequest` for what no type can say."""
    if not _NAMESPACE.fullmatch(operation.ns):
        raise BadRequest(
            f"ns must be 1 to 128 letters, digits and '.', '_', ':', '-', and begin with one of the first"
            f" (at {where}.ns)",
            BAD_REQUEST,
        )
    if isinstance(operation, KvGetMany):
        if len(operation.keys) > MOST_KEYS:
            raise BadRequest(f"getMany takes at most {MOST_KEYS} keys (at {where}.keys)", BAD_REQUEST)
        for index, key in enumerate(operation.keys):
            check_key(key, f"{where}.keys[{index}]")
        return
    if isinstance(operation, KvGetPrefix):
        if not operation.prefix:
            raise BadRequest(f"prefix must not be empty (at {where}.prefix)", "kv_prefix_required")
        check_key(operation.prefix, f"{where}.prefix")
        if operation.after:
            check_key(operation.after, f"{where}.after")
        return
    check_key(operation.key, f"{where}.key")
    if isinstance(operation, KvPut | KvPutIfAbsent | KvIncr):
        _check_expiry(operation, where)
    if isinstance(operation, KvPut | KvPutIfAbsent) and memoryview(operation.value).nbytes > MOST_VALUE_BYTES:
        raise BadRequest(f"value must have at most {MOST_VALUE_BYTES} bytes (at {where}.value)", BAD_REQUEST)
    if isinstance(operation, KvIncr):
        numbers = (operation.delta, operation.min or 0, operation.max or 0)
        if not all(math.isfinite(number) and abs(number) <= LARGEST_BIGINT for number in numbers):
            raise BadRequest(f"delta, min and max must be numbers of up to 63 bits (at {where})", BAD_REQUEST)


def _check_expiry(operation: KvPut | KvPutIfAbsent | KvIncr, where: str) -> None:
    if (operation.ttl_seconds is not UNSET) is operation.forever:
        raise BadRequest(f"exactly one of ttlSeconds and forever is required (at {where})", "kv_expiry_not_specified")


def check_key(key: str, where: str) -> None:
    """Raises `BadRequest` for what no key can be called."""
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise BadRequest(f"a key must be 1 to {LONGEST_KEY} printable characters (at {where})", BAD_REQUEST)


def namespaces_of(operations: Sequence[KvOperation]) -> set[str]:
    """The namespaces that operations name."""
    return {operation.ns for operation in operations}


def is_number(value: Any) -> bool:
    """Whether a decoded JSON value can be added to."""
    return isinstance(value, int | float) and not isinstance(value, bool)
