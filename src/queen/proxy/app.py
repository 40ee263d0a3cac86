"""The proxy: an HTTP server that requires a login, and forwards the requests of authenticated users."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

import asyncpg

from queen.errors import DatabaseUnavailable, SettingsError
from queen.http.auth.forwarded import came_by_https, client_address
from queen.http.server.limits import raise_file_limit
from queen.http.server.router import Generations
from queen.proxy.exchange import Exchange, Headers, KnownHead
from queen.proxy.front import BAD_GATEWAY, Front
from queen.proxy.login import Asked, Login, Reply, login_token, read_cookies
from queen.proxy.sessions import Identity
from queen.proxy.settings import ProxySettings
from queen.proxy.upstream import Upstream, Upstreams
from queen.proxy.users import UserStore
from queen.storage.database import unavailable_reason

# What concerns one connection alone, and what must not be believed of a client.
_NOT_FORWARDED: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
        b"cookie",
        b"referer",
        b"origin",
        b"authorization",
        b"expect",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
        b"sec-fetch-user",
        b"x-csrf-token",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"forwarded",
    }
)
_STRIPPED_PREFIXES: Final = (b"x-proxy-", b"x-auth-", b"x-forward-auth")
_LARGEST_OWN_BODY: Final = 64 * 1024
_KNOWN_HEADS: Final = 1024
_SWEEP_SECONDS: Final = 5.0
_GRACE_SECONDS: Final = 8.0
_LOOK_SECONDS = 15.0
"""How often the session of a WebSocket is checked."""

log = logging.getLogger(__name__)


class Proxy:
    """One process of it."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.login: Login
        self.fronts: set[Front] = set()
        self.closing = False
        self.heads: Generations[tuple[str, bytes], KnownHead] = Generations(_KNOWN_HEADS)
        self._addresses: Counter[str] = Counter()
        self._left = asyncio.Event()
        self._upstreams = Upstreams(settings.queen_server_url) if settings.forwards else None
        self._users: UserStore
        self._pool: asyncpg.Pool[asyncpg.Record]
        self._server: asyncio.Server
        self._most_connections = settings.max_connections
        self._sweeping: asyncio.Task[None]

    async def start(self) -> None:
        """Listen; raises `SettingsError` or `DatabaseUnavailable` where it cannot."""
        settings = self.settings
        if not settings.database_url:
            raise SettingsError("PG_HOST or DATABASE_URLS is not set: the proxy keeps its users in PostgreSQL")
        try:
            self._pool = await asyncpg.create_pool(settings.database_url, min_size=1, max_size=5, timeout=10)
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            raise DatabaseUnavailable(f"cannot connect to PostgreSQL: {unavailable_reason(error)}") from error
        self._users = UserStore(self._pool)
        await self._users.prepare()
        await self._users.forget_sessions()
        self.login = Login(settings, self._users)
        self.login.start()
        # Each may need one to the server behind, too.
        self._most_connections = raise_file_limit(2 * settings.max_connections) // 2
        loop = asyncio.get_running_loop()
        self._sweeping = loop.create_task(self._sweep())
        self._server = await loop.create_server(lambda: Front(self), settings.listen_host, settings.port, backlog=1024)

    async def stop(self) -> None:
        """Accept nothing more, and finish what was begun."""
        self.closing = True
        self._server.close()
        self._sweeping.cancel()
        for front in list(self.fronts):
            if front.is_idle:
                front.transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while any(not front.is_tunnel for front in self.fronts):
                    self._left.clear()
                    await self._left.wait()
        for front in list(self.fronts):
            front.transport.abort()
        if self._upstreams is not None:
            self._upstreams.close()
        await self.login.stop()
        await self._pool.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            now = asyncio.get_running_loop().time()
            for front in list(self.fronts):
                front.keep_time(now)

    # What connections call.

    def join(self, front: Front) -> tuple[int, str] | None:
        self.fronts.add(front)
        self._addresses[front.address] += 1
        settings = self.settings
        if len(self.fronts) > self._most_connections:
            return 503, "The proxy has too many connections; try again"
        if 0 < settings.max_connections_per_ip < self._addresses[front.address]:
            return 429, "This address has too many connections open"
        return None

    def leave(self, front: Front) -> None:
        self.fronts.discard(front)
        self._addresses[front.address] -= 1
        if not self._addresses[front.address]:
            del self._addresses[front.address]
        self._left.set()

    def upstream_for(self, known: KnownHead) -> Upstream | None:
        """An idle connection for a request that is passed on like the one before it; None: look at it again."""
        if self._upstreams is None or self.closing or self.login.sessions.recall(known.shown) is not known.identity:
            return None
        return self._upstreams.idle()

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Pass a request on at once, where all is known that is needed; else work that answers it."""
        upstreams = self._upstreams
        bearer = exchange.named.get(b"authorization", b"")
        if upstreams is not None and bearer[:7].lower() == b"bearer " and not exchange.upgrade:
            shown = bearer[7:].strip().decode("latin-1")
            identity = self.login.sessions.recall(shown)
            if (
                identity is not None
                and identity.may_send(exchange.method.decode())
                and not self._is_own(exchange)
                and (idle := upstreams.idle()) is not None
            ):
                head = self._head(exchange, identity, *self._origin(exchange))
                exchange.pass_on(idle, head, shown, identity)
                return None
        return self._serve(exchange)

    async def watch(self, exchange: Exchange, lost: Callable[[], None]) -> None:
        """End a tunnel whose session has ended."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                if await self.login.sessions.identify(exchange.token) is None:
                    lost()
                    return

    async def _serve(self, exchange: Exchange) -> None:
        front = exchange.front
        try:
            await self._decide(exchange, self._asked(exchange))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, ConnectionError, TimeoutError) as error:
            log.error("PostgreSQL is unavailable: %s", unavailable_reason(error))
            front.answer(exchange, 503, {"error": "PostgreSQL is unavailable"}, headers=[("Retry-After", "5")])

    async def _decide(self, exchange: Exchange, asked: Asked) -> None:
        front, login, settings = exchange.front, self.login, self.settings
        if asked.path in ("/health", "/health/ready") and asked.method in ("GET", "HEAD"):
            await self._health(exchange, asked.path)
            return
        if login.is_own(asked.path):
            asked.body = await _whole_body(exchange)
            if len(asked.body) > _LARGEST_OWN_BODY:
                front.answer(exchange, 413, {"error": f"The body is larger than {_LARGEST_OWN_BODY} bytes"})
                return
            _respond(exchange, await login.answer(asked))
            return
        identity = await login.identify(asked)
        if identity is None:
            if not settings.forwards and asked.path == "/" and not asked.wants_page:
                front.answer(exchange, 200, {"service": "queen-proxy", "mode": "forward-auth-only"})
                return
            if settings.forwards or asked.path == "/":
                _respond(exchange, login.unauthenticated(asked))
                return
        if self._upstreams is None:
            front.answer(exchange, 404, {"error": "not_found", "mode": "forward-auth-only"})
            return
        assert identity is not None
        refused = login.refuse_forgery(asked, identity)
        if refused is not None:
            _respond(exchange, refused)
        elif not identity.may_send(asked.method):
            detail = f"the role {identity.role} may not send {asked.method} requests"
            front.answer(exchange, 403, {"error": "Insufficient permissions", "detail": detail})
        else:
            await self._forward(exchange, self._upstreams, asked, identity)

    async def _forward(self, exchange: Exchange, upstreams: Upstreams, asked: Asked, identity: Identity) -> None:
        head = self._head(exchange, identity, asked.address, asked.secure)
        try:
            upstream = await upstreams.connect()
        except (OSError, TimeoutError) as error:
            log.error(
                "%s %s could not be forwarded: %s",
                exchange.method.decode(),
                exchange.path,
                str(error) or type(error).__name__,
            )
            exchange.front.answer(exchange, 502, BAD_GATEWAY)
            return
        exchange.pass_on(upstream, head, login_token(asked) or "", identity)

    async def _health(self, exchange: Exchange, path: str) -> None:
        if path == "/health/ready":
            try:
                async with asyncio.timeout(3):
                    await self._users.ping()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                said = f"PostgreSQL: {unavailable_reason(error)}"
                exchange.front.answer(exchange, 503, {"status": "unavailable", "error": said})
                return
        exchange.front.answer(exchange, 200, {"status": "ok"})

    def _is_own(self, exchange: Exchange) -> bool:
        if exchange.target.startswith(b"/api/v1/"):
            return False
        path = exchange.path
        return path in ("/health", "/health/ready") or self.login.is_own(path)

    def _head(self, exchange: Exchange, identity: Identity, address: str, secure: bool) -> bytes:
        """What the server behind is sent first."""
        upstreams = self._upstreams
        assert upstreams is not None
        exchange.token = identity.token
        lines = [b"%b %b%b HTTP/1.1\r\n" % (exchange.method, upstreams.prefix, exchange.target), upstreams.host_line]
        for name, value in exchange.headers:
            if name in _NOT_FORWARDED or name.startswith(_STRIPPED_PREFIXES):
                continue
            if name == b"sec-websocket-protocol":
                offered = [each for each in value.split(b",") if not each.strip().startswith(b"bearer.")]
                if not offered:
                    continue
                value = b",".join(offered)
            lines.append(b"%b: %b\r\n" % (name, value))
        if exchange.chunked:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        if exchange.upgrade:
            lines.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
        lines.append(
            b"Authorization: Bearer %b\r\nX-Proxy-User: %b\r\nX-Proxy-Role: %b\r\nX-Proxy-External: %b\r\n"
            b"X-Forwarded-For: %b\r\nX-Forwarded-Host: %b\r\nX-Forwarded-Proto: %b\r\n\r\n"
            % (
                identity.token.encode(),
                _plain(identity.username),
                identity.role.encode(),
                b"true" if identity.external else b"false",
                _plain(address),
                exchange.named.get(b"host", b""),
                b"https" if secure else b"http",
            )
        )
        return b"".join(lines)

    def _origin(self, exchange: Exchange) -> tuple[str, bool]:
        """The address of the client, and whether it came by HTTPS."""
        address, hops = exchange.front.address, self.settings.trusted_proxies
        if not hops:
            return address, False
        address = client_address(_joined(exchange.headers, b"x-forwarded-for"), address, hops)
        return address, came_by_https(_joined(exchange.headers, b"x-forwarded-proto"), hops, False)

    def _asked(self, exchange: Exchange) -> Asked:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers}
        if exchange.upgrade and "authorization" not in headers:
            # A browser cannot set it on a WebSocket.
            offered = [each.strip() for each in headers.get("sec-websocket-protocol", "").split(",")]
            for token in (each.removeprefix("bearer.") for each in offered if each.startswith("bearer.")):
                headers["authorization"] = f"Bearer {token}"
        query = exchange.target.partition(b"?")[2].decode("latin-1")
        address, secure = self._origin(exchange)
        return Asked(
            exchange.method.decode(),
            exchange.path,
            dict(parse_qsl(query, keep_blank_values=True)),
            headers,
            read_cookies(headers.get("cookie", "")),
            address,
            secure,
        )


async def _whole_body(exchange: Exchange) -> bytes:
    """The body, as far as it is not too large."""
    if not exchange.ended:
        exchange.whole = asyncio.Event()
        exchange.front.want(exchange)
        await exchange.whole.wait()
    return exchange.take_body()


def _respond(exchange: Exchange, reply: Reply) -> None:
    headers = [*reply.headers.items(), *(("Set-Cookie", cookie) for cookie in reply.cookies)]
    exchange.front.answer(exchange, reply.status, body=reply.body, content_type=reply.content_type, headers=headers)


def _joined(headers: Headers, name: bytes) -> str:
    """All lines of a header: some proxies add a line to those of others instead of an entry."""
    return ",".join(value.decode("latin-1") for found, value in headers if found == name)


def _plain(text: str) -> bytes:
    return "".join(letter for letter in text if letter.isprintable()).encode("ascii", "replace")


async def serve(settings: ProxySettings, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then finish what was begun."""
    proxy = Proxy(settings)
    await proxy.start()
    try:
        target = urlsplit(settings.queen_server_url).netloc or "nothing (ForwardAuth only)"
        log.info("the proxy listens on %s:%d and forwards to %s", settings.listen_host, settings.port, target)
        await stopping.wait()
    finally:
        await proxy.stop()
