"""Declaring routes: one declaration beside each handler, from which everything else is read.

A module of handlers has a `RouteTable`; `queen.http.api.table` names the modules. The router, `/openapi.json`, access
control and the dispatch to shards are all read off `all_routes()`.

A handler is of one of three kinds:

- `on_shard`: `async def handler(shard: Shard, call: Call[Query, Body]) -> Answer`. It serves one shard; `placement`
  says on which shards it runs and how their answers are merged.
- `on_worker`: the same with `api: Api`, for what concerns the worker as a whole.
- `direct`: `def handler(api: Api, request: Request) -> Response | Awaitable[Response]`, for the hot routes, which
  decode and render by themselves. It works on `api.broker`, the broker of one shard or of all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import msgspec

from queen.http.auth.names import NameReader
from queen.http.routing.call import Call, Reply
from queen.http.routing.context import Api, Shard
from queen.http.routing.placement import Placement
from queen.http.routing.query import check_names, query_parser
from queen.http.server.message import Access, Connection, Handler, Request, Response
from queen.wire.decode import decoder
from queen.wire.push import check_utf8

Q = TypeVar("Q")
B = TypeVar("B")
R = TypeVar("R")
P = ParamSpec("P")

DATABASE: Final = (503,)
FOUND: Final = (404, 503)
# Without the key of an encrypted message it can be neither stored nor read.
SEALED: Final = (409, 503)

_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Media:
    """A body that is not JSON."""

    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The declaration of one route.

    `returns` are the successes, and failures that say more than an error text: by status the type of the body, a
    `Media`, or None for no body. `errors` are the other statuses that the handler answers with; those that every route
    has are added by the OpenAPI document.
    """

    method: str
    path: str
    access: Access | Callable[[Api], Access]
    names: NameReader | None = None
    """What requests name beyond the parameters of the path: all of it has to be within the limits of a token."""
    of_groups: bool = True
    """Whether a request that names no consumer group concerns all of them."""
    of_topics: bool = False
    """Whether mqueue's scopes decide about it."""
    audited: bool = False
    """Whether calls are recorded although no administrator is needed for them."""
    handler: Callable[..., Any]
    kind: Literal["shard", "worker", "direct"]
    id: str
    tag: str
    summary: str
    description: str = ""
    placement: Placement | None = None
    query: Any = None
    body: Any = None
    decode: Callable[[bytes], Any] | None = None
    body_required: bool = True
    body_example: Any = None
    example: Any = None
    returns: Mapping[int, Any]
    errors: tuple[int, ...] = ()
    cached: bool = False
    upgrade: Callable[[Api, Request, Connection], Response | None] | None = None
    streams: bool = False
    """A direct handler that answers with a `ResponseStream`."""

    @property
    def key(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def status(self) -> int:
        """The status of an ordinary success."""
        return min(self.returns)

    def access_of(self, api: Api) -> Access:
        return self.access if isinstance(self.access, Access) else self.access(api)

    def decode_body(self, body: bytes) -> Any:
        """What a body holds; None where the route takes none, or an optional one is absent."""
        if self.decode is None or (not body and not self.body_required):
            return None
        return self.decode(body)


class RouteTable:
    """The routes of one module; `tag` is their heading in the documentation, `common` what all of them declare."""

    def __init__(self, tag: str, **common: Any) -> None:
        self._common = {"tag": tag, **common}
        self.operations: list[Operation] = []

    def on_shard(
        self,
        method: str,
        path: str,
        *,
        placement: Placement,
        query: type[Q] | None = None,
        body: Any = None,
        decode: Callable[[bytes], Any] | None = None,
        **declared: Any,
    ) -> Callable[[Callable[[Shard, Call[Q, B]], Awaitable[R]]], Callable[[Shard, Call[Q, B]], Awaitable[R]]]:
        """Declare a handler that serves one shard."""

        def declare(handler: Callable[[Shard, Call[Q, B]], Awaitable[R]]) -> Any:
            self._add(
                method, path, "shard", handler, placement=placement, query=query, body=body, decode=decode, **declared
            )
            return handler

        return declare

    def on_worker(
        self,
        method: str,
        path: str,
        *,
        query: type[Q] | None = None,
        body: Any = None,
        decode: Callable[[bytes], Any] | None = None,
        **declared: Any,
    ) -> Callable[[Callable[[Api, Call[Q, B]], Awaitable[R]]], Callable[[Api, Call[Q, B]], Awaitable[R]]]:
        """Declare a handler that serves the worker as a whole."""

        def declare(handler: Callable[[Api, Call[Q, B]], Awaitable[R]]) -> Any:
            declared.update(query=query, body=body, decode=decode)
            self._add(method, path, "worker", handler, **declared)
            return handler

        return declare

    def direct(
        self, method: str, path: str, **declared: Any
    ) -> Callable[[Callable[Concatenate[Api, P], R]], Callable[Concatenate[Api, P], R]]:
        """Declare a handler that is given the request as it came, and answers with a response."""

        def declare(handler: Callable[Concatenate[Api, P], R]) -> Callable[Concatenate[Api, P], R]:
            self._add(method, path, "direct", handler, **declared)
            return handler

        return declare

    def _add(self, method: str, path: str, kind: Any, handler: Callable[..., Any], **declared: Any) -> None:
        if declared.get("body") is not None and declared.get("decode") is None and kind != "direct":
            declared["decode"] = _body_decoder(declared["body"])
        declared = {"id": _camel(handler.__name__), **self._common, **declared}
        self.operations.append(Operation(method=method, path=path, kind=kind, handler=handler, **declared))


def _body_decoder(kind: Any) -> Callable[[bytes], Any]:
    decode, check = decoder(kind), check_names(kind)

    def decode_and_check(body: bytes) -> Any:
        decoded = decode(body)
        # The decoder passes over what is stored as it came.
        check_utf8(body)
        check(decoded)
        return decoded

    return decode_and_check


def bind_worker(operation: Operation, api: Api) -> Handler:
    """The handler of a route that concerns the worker as a whole."""
    if operation.kind == "direct":
        return partial(operation.handler, api)
    return serving(operation, lambda call: operation.handler(api, call))


def bind_shard(operation: Operation, shard: Shard) -> Handler:
    """The handler of a route on the one shard there is."""
    return serving(operation, lambda call: operation.handler(shard, call))


def serving(operation: Operation, answer: Callable[[Call[Any, Any]], Awaitable[Any]]) -> Handler:
    """From the request to the call, and from the answer to the response."""
    status = operation.status

    async def serve(request: Request) -> Response:
        result = await answer(Call(request, request.args, operation.decode_body(request.body)))
        if isinstance(result, Response):
            return result
        if isinstance(result, Reply):
            return Response(result.status, _encode(result.value))
        return Response(status, _encode(result))

    return serve


def parse_query(operation: Operation) -> Callable[[Mapping[str, str]], Any]:
    """Parses the query of a route; parameters that it does not have are refused."""
    return query_parser(operation.query)


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
