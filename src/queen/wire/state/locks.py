"""Operations on locks: the body of `POST /api/v1/locks`."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from queen.errors import BadRequest
from queen.wire.decode import decoder
from queen.wire.fields import LARGEST_BIGINT, Answer, Body, Count, Pagination, Time

NAMESPACE: Final = "queen-locks"
"""Where the permits of locks are keys."""
MOST_PERMITS: Final = 1024
MOST_LOCKS: Final = 100
BAD_REQUEST: Final = "locks_bad_request"

_LONGEST_NAME: Final = 256
_LONGEST_TTL: Final = 366 * 86_400

LockName: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": _LONGEST_NAME})]
Owner: TypeAlias = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": _LONGEST_NAME})]
_Ttl: TypeAlias = Annotated[int, Meta(ge=1, le=_LONGEST_TTL)]
_Token: TypeAlias = Annotated[int, Meta(ge=1, le=LARGEST_BIGINT)]
_Slot: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_PERMITS)]


class Acquire(Body, tag_field="op", tag="acquire"):
    """Take a permit, of which there are `limit`; all requests for the lock must give the same limit."""

    name: LockName
    ttl_seconds: _Ttl
    owner: Owner | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_PERMITS)] = 1


class Renew(Body, tag_field="op", tag="renew"):
    """Have a permit last longer, from now; it gets a new token. With `owner` also after its answer was lost."""

    name: LockName
    token: _Token
    ttl_seconds: _Ttl
    slot: _Slot = 0
    owner: Owner | None = None


class Release(Body, tag_field="op", tag="release"):
    """Give a permit back."""

    name: LockName
    token: _Token
    slot: _Slot = 0


class Look(Body, tag_field="op", tag="get"):
    """Who holds the permits."""

    name: LockName


LockOperation: TypeAlias = Acquire | Renew | Release | Look


class LockBody(Body):
    """Operations on different locks; each is done by itself."""

    operations: list[LockOperation]


class Holder(Answer):
    """Who holds a permit, since when and until when."""

    slot: Count
    owner: str
    token: Count
    since: Time
    expires_at: Time | None
    renewed_at: Time


class Guard(Answer):
    """An operation at `kv` that holds while the permit does."""

    op: Literal["check"]
    ns: str
    key: str
    expect: Count
    required: bool


class LockResult(Answer):
    """`acquired`, `renewed`, `released` or `held`, as was asked for; the `token` only rises on a lock.

    `already`: the owner had the permit before. Else the `reason` is `held` (by the `holders`) or `lost`.
    """

    index: Count
    name: str
    acquired: bool | UnsetType = UNSET
    renewed: bool | UnsetType = UNSET
    released: bool | UnsetType = UNSET
    held: bool | UnsetType = UNSET
    already: bool | UnsetType = UNSET
    reason: Literal["held", "lost"] | UnsetType = UNSET
    slot: Count | UnsetType = UNSET
    token: Count | UnsetType = UNSET
    owner: str | UnsetType = UNSET
    expires_at: Time | UnsetType | None = UNSET
    guard: Guard | UnsetType = UNSET
    holders: list[Holder] | UnsetType = UNSET


class LockAnswer(Answer):
    """One result for each operation, in order."""

    results: list[LockResult]


class HeldLock(Holder):
    """A permit that is held, and of which lock."""

    name: str


class LockList(Answer):
    """A page of the permits that are held, by the names of their locks. Where `total` is not `exact` there are more."""

    locks: list[HeldLock]
    total: Count
    exact: bool
    pagination: Pagination


_body: Final = decoder(LockBody)


def decode_locks(body: bytes) -> list[LockOperation]:
    """The operations of `POST /api/v1/locks`. Raises `BadRequest` that says which is wrong, and how."""
    try:
        operations: list[LockOperation] = _body(body).operations
        if len(operations) > MOST_LOCKS:
            raise BadRequest(f"a request has at most {MOST_LOCKS} operations, not {len(operations)}")
        names: set[str] = set()
        for index, operation in enumerate(operations):
            where = f"operations[{index}]"
            _check_text(operation.name, "name", where)
            if "#" in operation.name:
                raise BadRequest(f"name must not contain '#' (at {where}.name)")
            if operation.name in names:
                raise BadRequest(f"each operation must be on a different lock (at {where}.name)")
            names.add(operation.name)
            if isinstance(operation, Acquire | Renew) and operation.owner is not None:
                _check_text(operation.owner, "owner", where)
    except BadRequest as error:
        raise BadRequest(str(error), BAD_REQUEST) from error
    return operations


def _check_text(text: str, what: str, where: str) -> None:
    if not text or len(text.encode()) > _LONGEST_NAME or not text.isprintable():
        raise BadRequest(f"{what} must be 1 to {_LONGEST_NAME} bytes of printable characters (at {where}.{what})")
