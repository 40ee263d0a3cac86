"""The proxy: an HTTP server that asks people to log in, and passes on what those may ask who have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from queen.errors import DatabaseUnavailable, SettingsError
from queen.proxy.login import Asked, Login, Reply, may_use
from queen.proxy.sessions import Identity
from queen.proxy.settings import ProxySettings
from queen.proxy.users import UserStore

# What concerns one connection alone, and what must not be believed of a client.
_NOT_FORWARDED: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "cookie",
        "referer",
        "origin",
        "authorization",
        "expect",
        "sec-fetch-site",
        "sec-fetch-mode",
        "sec-fetch-dest",
        "sec-fetch-user",
        "x-csrf-token",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-real-ip",
    }
)
_STRIPPED_PREFIXES: Final = ("x-proxy-", "x-auth-", "x-forward-auth")
_NOT_RETURNED: Final = frozenset({"connection", "keep-alive", "transfer-encoding", "set-cookie", "content-length"})
_SMALL_BODY: Final = 64 * 1024
_LARGEST_OWN_BODY: Final = 64 * 1024
_SECURITY: Final = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
_BAD_GATEWAY: Final = {"error": "Bad gateway - Queen server unreachable"}

log = logging.getLogger(__name__)


class Proxy:
    """One process of it."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.login: Login
        self._upstream: aiohttp.ClientSession
        self._users: UserStore

    def app(self) -> web.Application:
        app = web.Application(client_max_size=0)
        app.cleanup_ctx.append(self._resources)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def _resources(self, app: web.Application) -> AsyncIterator[None]:
        if not self.settings.database_url:
            raise SettingsError("PG_HOST or DATABASE_URLS is not set: the proxy keeps its users in PostgreSQL")
        try:
            pool = await asyncpg.create_pool(self.settings.database_url, min_size=1, max_size=5, timeout=10)
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            raise DatabaseUnavailable(f"cannot connect to PostgreSQL: {error or type(error).__name__}") from error
        self._users = UserStore(pool)
        await self._users.prepare()
        await self._users.forget_sessions()
        self.login = Login(self.settings, self._users)
        self.login.start()
        self._upstream = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        yield
        await self._upstream.close()
        await self.login.stop()
        await pool.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path in ("/health", "/health/ready") and request.method in ("GET", "HEAD"):
            return await self._health(request)
        asked = self._asked(request)
        login = self.login
        if login.is_own(request.path):
            if request.method == "POST":
                body = await request.content.read(_LARGEST_OWN_BODY)
                asked = self._asked(request, body)
            return _respond(await login.answer(asked))
        identity = await login.identify(asked)
        if identity is None:
            if not self.settings.forwards and request.path == "/" and not asked.wants_page:
                return _json(200, {"service": "queen-proxy", "mode": "forward-auth-only"})
            if self.settings.forwards or request.path == "/":
                return _respond(login.unauthenticated(asked))
        if not self.settings.forwards:
            return _json(404, {"error": "not_found", "mode": "forward-auth-only"})
        assert identity is not None
        refused = login.refuse_forgery(asked, identity)
        if refused is not None:
            return _respond(refused)
        if not may_use(identity.role, request.method):
            detail = f"the role {identity.role} may not send {request.method} requests"
            return _json(403, {"error": "Insufficient permissions", "detail": detail})
        headers = self._headers(request, identity, asked)
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._tunnel(request, headers)
        return await self._forward(request, headers)

    async def _health(self, request: web.Request) -> web.Response:
        if request.path == "/health/ready":
            try:
                async with asyncio.timeout(3):
                    await self._users.ping()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                return _json(503, {"status": "unavailable", "error": f"PostgreSQL: {error or type(error).__name__}"})
        return _json(200, {"status": "ok"})

    async def _forward(self, request: web.Request, headers: CIMultiDict[str]) -> web.StreamResponse:
        url = self.settings.queen_server_url + request.raw_path
        try:
            async with self._upstream.request(
                request.method,
                # The path goes on as it came, percent signs and all.
                URL(url, encoded=True),
                headers=headers,
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            ) as upstream:
                return await self._pass_back(request, upstream)
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            log.error("%s %s could not be passed on: %s", request.method, request.path, error)
            return _json(502, _BAD_GATEWAY)

    async def _pass_back(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = CIMultiDict(
            (name, value) for name, value in upstream.headers.items() if name.lower() not in _NOT_RETURNED
        )
        length = upstream.content_length
        if request.method == "HEAD" or upstream.status in (204, 304):
            return web.Response(status=upstream.status, headers=headers)
        if length is not None and length <= _SMALL_BODY:
            return web.Response(status=upstream.status, headers=headers, body=await upstream.read())
        response = web.StreamResponse(status=upstream.status, headers=headers)
        response.content_length = length
        await response.prepare(request)
        async for piece in upstream.content.iter_any():
            await response.write(piece)
        await response.write_eof()
        return response

    async def _tunnel(self, request: web.Request, headers: CIMultiDict[str]) -> web.StreamResponse:
        offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        protocols = [name for name in offered if name and not name.startswith("bearer.")]
        for name in [name for name in headers if name.lower().startswith("sec-websocket-")]:
            del headers[name]
        url = self.settings.queen_server_url + request.raw_path
        try:
            behind = await self._upstream.ws_connect(
                URL(url, encoded=True), protocols=protocols, headers=headers, max_msg_size=0
            )
        except aiohttp.WSServerHandshakeError as error:
            return _json(error.status, {"error": error.message})
        except (aiohttp.ClientError, TimeoutError) as error:
            log.error("a WebSocket could not be passed on: %s", error)
            return _json(502, _BAD_GATEWAY)
        front = web.WebSocketResponse(protocols=protocols, max_msg_size=0)
        await front.prepare(request)
        ways = [asyncio.create_task(_pump(front, behind)), asyncio.create_task(_pump(behind, front))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        with contextlib.suppress(ConnectionError):
            await behind.close(code=front.close_code or 1000)
            await front.close(code=behind.close_code or 1000)
        return front

    def _headers(self, request: web.Request, identity: Identity, asked: Asked) -> CIMultiDict[str]:
        headers = CIMultiDict(
            (name, value)
            for name, value in request.headers.items()
            if name.lower() not in _NOT_FORWARDED and not name.lower().startswith(_STRIPPED_PREFIXES)
        )
        headers["Authorization"] = f"Bearer {identity.token}"
        headers["X-Proxy-User"] = identity.username.encode("ascii", "replace").decode()
        headers["X-Proxy-Role"] = identity.role
        headers["X-Proxy-External"] = "true" if identity.external else "false"
        headers["X-Forwarded-For"] = asked.address
        headers["X-Forwarded-Host"] = asked.host
        headers["X-Forwarded-Proto"] = "https" if asked.secure else "http"
        return headers

    def _asked(self, request: web.Request, body: bytes = b"") -> Asked:
        headers = {name.lower(): value for name, value in request.headers.items()}
        address, secure = request.remote or "", request.secure
        if self.settings.trusted_proxies:
            address, secure = _through_proxies(headers, address, secure, self.settings.trusted_proxies)
        return Asked(
            request.method,
            request.path,
            dict(request.query),
            headers,
            dict(request.cookies),
            address,
            secure,
            body,
        )


def _through_proxies(headers: Mapping[str, str], address: str, secure: bool, hops: int) -> tuple[str, bool]:
    """What the proxies in front say of the client; only the entries that they themselves have added count."""
    chain = [entry.strip() for entry in headers.get("x-forwarded-for", "").split(",") if entry.strip()]
    if len(chain) >= hops:
        address = chain[-hops]
    scheme = headers.get("x-forwarded-proto", "").rpartition(",")[2].strip()
    return address, scheme == "https" if scheme else secure


async def _pump(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.TEXT:
            await target.send_str(message.data)
        elif message.type is aiohttp.WSMsgType.BINARY:
            await target.send_bytes(message.data)


def _respond(reply: Reply) -> web.Response:
    response = web.Response(status=reply.status, body=reply.body, headers={**_SECURITY, **reply.headers})
    response.headers["Content-Type"] = reply.content_type
    for cookie in reply.cookies:
        response.headers.add("Set-Cookie", cookie)
    return response


def _json(status: int, value: object) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), content_type="application/json", headers=_SECURITY
    )


async def serve(settings: ProxySettings, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set, then finish what was begun."""
    runner = web.AppRunner(Proxy(settings).app(), access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.listen_host, settings.port, shutdown_timeout=8).start()
        target = urlsplit(settings.queen_server_url).netloc or "nothing (ForwardAuth only)"
        log.info("the proxy listens on %s:%d and forwards to %s", settings.listen_host, settings.port, target)
        await stopping.wait()
    finally:
        await runner.cleanup()
