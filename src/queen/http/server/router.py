"""From a method and a request target to the handler that serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

from queen.errors import BadRequest
from queen.http.server.message import Access, Handler, HttpError, Request, Response, Route, UpgradeHandler

K = TypeVar("K")
V = TypeVar("V")


class Generations(Generic[K, V]):
    """Remembers up to twice `most` entries without any bookkeeping per hit: a full generation becomes the older one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: dict[K, V] = {}
        self._older: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        found = self._recent.get(key)
        if found is None:
            found = self._older.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        if len(self._recent) >= self._most:
            self._older = self._recent
            self._recent = {}
        self._recent[key] = value

    def clear(self) -> None:
        self._recent.clear()
        self._older.clear()


Around = Callable[[Route], Handler]

CACHED_TARGETS: Final = 2048
LONGEST_CACHED_TARGET: Final = 512


class Match(NamedTuple):
    """What a target means. `route` is None where the server itself answers: preflight, 400, 404 and 405."""

    method: str
    path: str
    params: Mapping[str, str]
    query: Mapping[str, str]
    handler: Handler
    route: Route | None
    args: Any = None


class Router:
    """The table of routes. Static segments beat parameters; a trailing slash makes no difference."""

    def __init__(self, around: Around | None = None) -> None:
        """`around` is shown every route as it is added; the handler it returns serves in place of the route's own.

        A request therefore costs nothing more without observers.
        """
        self.routes: list[Route] = []
        self._around = around
        self._root = _Node()
        self._fallback: Route | None = None
        self._known: Generations[tuple[bytes, bytes], Match] = Generations(CACHED_TARGETS)

    def add(
        self,
        method: str,
        pattern: str,
        handler: Handler,
        access: Access = Access.ADMIN,
        *,
        upgrade: UpgradeHandler | None = None,
        parse_query: Callable[[Mapping[str, str]], Any] | None = None,
        declaration: Any = None,
        streams: bool = False,
    ) -> None:
        """Serve `method` at `pattern`, such as `/api/v1/pop/queue/{queue}`. A GET route serves HEAD as well.

        A request to upgrade goes to `upgrade` with its connection: it answers with a response, or hands the connection
        to another protocol and returns None. The handler of a route that `streams` answers with a `ResponseStream`.
        """
        segments = _pattern_segments(pattern)
        node = self._root
        for segment in segments:
            node = node.step(segment)
        if method in node.routes:
            raise ValueError(f"{method} {pattern} is already served by {node.routes[method].pattern}")
        names = tuple(segment[1:-1] for segment in segments if segment.startswith("{"))
        route = Route(method, pattern, handler, access, upgrade, names, parse_query, declaration, streams)
        if self._around is not None and not route.holds_connection:
            route = replace(route, handler=self._around(route))
        node.routes[method] = route
        self.routes.append(route)
        self._known.clear()

    @property
    def fallback(self) -> Handler | None:
        """Serves every path that no route knows, such as the files of the dashboard; open to the public."""
        return self._fallback.handler if self._fallback else None

    @fallback.setter
    def fallback(self, handler: Handler | None) -> None:
        self._fallback = Route("*", "*", handler, Access.PUBLIC) if handler else None

    def match(self, method: bytes, target: bytes) -> Match:
        """What to do with this request line. There always is an answer: unknown paths match a 404."""
        # Clients repeat the same few targets, so this look-up is nearly always all there is to do.
        found = self._known.get((method, target))
        return found if found is not None else self._remember(method, target)

    def _remember(self, method: bytes, target: bytes) -> Match:
        found = self._resolve(method.decode("latin-1"), target)
        # Only targets with a route are cached: unknown paths can be made up without end.
        if found.route is not None and found.route is not self._fallback and len(target) <= LONGEST_CACHED_TARGET:
            self._known.put((method, target), found)
        return found

    def _resolve(self, method: str, target: bytes) -> Match:
        raw_path, raw_query = _split_target(target)
        path = raw_path.decode("latin-1")
        if method == "OPTIONS":
            return Match(method, path, {}, {}, _preflight, None)
        try:
            query = _parse_query(raw_query)
            segments = _path_segments(raw_path)
            route, values = self._find(method, segments)
        except HttpError as error:
            return Match(method, path, {}, {}, _always(error), None)
        params = dict(zip(route.parameters, values, strict=True))
        args = None
        if route.parse_query is not None:
            try:
                args = route.parse_query(query)
            except BadRequest as error:
                return Match(method, path, params, query, _always(HttpError(400, str(error))), route)
        return Match(method, path, params, query, route.handler, route, args)

    def _find(self, method: str, segments: Sequence[str]) -> tuple[Route, tuple[str, ...]]:
        allowed: set[str] = set()
        for node, values in self._root.leaves(segments):
            route = node.routes.get(method)
            if route is None and method == "HEAD":
                route = node.routes.get("GET")
            if route is not None:
                return route, values
            allowed.update(node.routes)
        if allowed:
            raise HttpError(405, "Method Not Allowed", ((b"Allow", _allow(allowed)),))
        if self._fallback is None:
            raise HttpError(404, "Not Found")
        return self._fallback, ()


@dataclass(slots=True)
class _Node:
    """A place in the tree of path segments."""

    static: dict[str, _Node] = field(default_factory=dict)
    parameter: _Node | None = None
    routes: dict[str, Route] = field(default_factory=dict)

    def step(self, segment: str) -> _Node:
        if not segment.startswith("{"):
            return self.static.setdefault(segment, _Node())
        if self.parameter is None:
            self.parameter = _Node()
        return self.parameter

    def leaves(self, segments: Sequence[str], values: tuple[str, ...] = ()) -> Iterator[tuple[_Node, tuple[str, ...]]]:
        """Every node these segments lead to, with the values of its parameters, the most static first."""
        if not segments:
            yield self, values
            return
        first, rest = segments[0], segments[1:]
        if first in self.static:
            yield from self.static[first].leaves(rest, values)
        if self.parameter is not None and first:
            yield from self.parameter.leaves(rest, (*values, first))


def _pattern_segments(pattern: str) -> list[str]:
    if not pattern.startswith("/"):
        raise ValueError(f"the pattern {pattern!r} does not start with a slash")
    segments = pattern[1:].split("/") if pattern != "/" else []
    for segment in segments:
        name = segment[1:-1] if segment.startswith("{") and segment.endswith("}") else segment
        if not name or "{" in name or "}" in name:
            raise ValueError(f"the pattern {pattern!r} holds {segment!r}; use plain text or {{name}}")
    return segments


def _split_target(target: bytes) -> tuple[bytes, bytes]:
    if not target.startswith(b"/"):
        # The absolute form, http://host/path, is what a client sends to a proxy; a server has to take it too.
        scheme, _, rest = target.partition(b"://")
        if scheme.lower() in (b"http", b"https"):
            authority = rest.partition(b"/")[0].partition(b"?")[0]
            target = rest[len(authority) :]
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return path or b"/", query


def _path_segments(path: bytes) -> list[str]:
    # Splitting comes before decoding, so that an encoded slash stays inside its segment.
    segments = path.removeprefix(b"/").removesuffix(b"/").split(b"/")
    if segments == [b""]:
        return []
    return [_decode(segment, "The path segment") for segment in segments]


def _parse_query(query: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in query.replace(b"+", b" ").split(b"&"):
        name, _, value = pair.partition(b"=")
        if name:
            found.setdefault(_decode(name, "The query parameter"), _decode(value, "The query value"))
    return found


def _decode(raw: bytes, what: str) -> str:
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
        raise HttpError(400, f"{what} {text!r} is not valid UTF-8 once percent-decoded") from None


def _allow(methods: set[str]) -> bytes:
    implied = {"OPTIONS", "HEAD"} if "GET" in methods else {"OPTIONS"}
    return ", ".join(sorted(methods | implied)).encode()


def _preflight(request: Request) -> Response:
    return Response(204, headers=((b"Access-Control-Max-Age", b"86400"),))


def upgrade_required(request: Request) -> Response:
    """The handler of routes that take WebSocket connections only."""
    raise HttpError(426, "This route takes WebSocket connections only", ((b"Upgrade", b"websocket"),))


def _always(error: HttpError) -> Handler:
    def answer(request: Request) -> Response:
        return error.response()

    return answer
