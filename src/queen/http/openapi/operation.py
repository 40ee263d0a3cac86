"""What can be said of a route: the pieces of a description, and the types that descriptions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from queen.wire.push import LONGEST_NAME

# What `check_name` calls printable: neither control characters nor any space but the plain one.
_PRINTABLE: Final = {"pattern": r"^[\p{L}\p{M}\p{N}\p{P}\p{S} ]*$"}
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME, extra_json_schema=_PRINTABLE)]
OptionalName: TypeAlias = Annotated[str, Meta(max_length=LONGEST_NAME, extra_json_schema=_PRINTABLE)]
Uuid: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
Time: TypeAlias = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Count: TypeAlias = Annotated[int, Meta(ge=0)]


class Body(msgspec.Struct, rename="camel"):
    """What a client sends. Fields that are not named here are ignored."""


class Answer(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """What the server answers. Tests hold it to exactly these fields; a later version may add to them."""


class SnakeAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """An answer whose fields have underscores, as its clients expect."""


class Error(Answer):
    """Why a request was refused: what is wrong, where, and what to do."""

    error: str
    success: bool | msgspec.UnsetType = msgspec.UNSET


class Pagination(Answer):
    """The page that was answered; `total` counts what all pages hold together."""

    limit: Count
    offset: Count
    total: Count | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Media:
    """A body that is not JSON."""

    media_type: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """Something in the query of a request. `type` is a type whose JSON schema says what is accepted."""

    name: str
    meaning: str
    type: Any = str
    default: object = None
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The description of one route.

    `answers` are the successes, and failures that say more than an `Error`: by status the type of the body, a `Media`,
    or None for no body at all. `errors` are the other refusals that the handler knows; those that every route has are
    added by the document.
    """

    id: str
    summary: str
    answers: Mapping[int, Any]
    tag: str
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    body_required: bool = True
    body_example: Any = None
    example: Any = None
    errors: tuple[int, ...] = ()


DATABASE: Final = (503,)
FOUND: Final = (404, 503)
# Without the key of an encrypted message it can be neither stored nor read.
SEALED: Final = (409, 503)

LIMIT_MEANING: Final = "How many to answer at most; a number out of range becomes the nearest that is in it."


def paging(default: int, most: int = 1000) -> tuple[Parameter, Parameter]:
    """`limit` and `offset` of a list."""
    return (
        Parameter("limit", LIMIT_MEANING, Annotated[int, Meta(ge=1, le=most)], default),
        Parameter("offset", "How many to skip.", Annotated[int, Meta(ge=0, le=1 << 53)], 0),
    )
