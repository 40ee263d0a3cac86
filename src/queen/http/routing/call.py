"""One request to a declared handler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from queen.http.server.message import Request
from queen.wire.push import check_name

Q = TypeVar("Q")
B = TypeVar("B")

_GROUP: Final = "ConsumerGroup"


class Reply(NamedTuple):
    """An answer with another status than the first one of its route."""

    status: int
    value: Any


class Call(Generic[Q, B]):
    """One request to a handler: names in the path, the parsed query, and the decoded body."""

    __slots__ = ("body", "query", "request")

    def __init__(self, request: Request, query: Q, body: B) -> None:
        self.request = request
        self.query = query
        self.body = body

    @property
    def params(self) -> Mapping[str, str]:
        return self.request.params

    def name(self, key: str) -> str:
        """The name at `{key}` of the path. Raises `BadRequest` when nothing can be called like this."""
        name = self.request.params[key]
        check_name(name, _GROUP if key == "group" else key.capitalize(), f"<{key}> in the path")
        return name

    def with_query(self, **changes: Any) -> Call[Q, B]:
        """The same call with other parameters."""
        query: Any = self.query
        return Call(self.request, msgspec.structs.replace(query, **changes), self.body)
