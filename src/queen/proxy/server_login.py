"""The login page inside a server: QUEEN_LOGIN=true, for installations without a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Final

import asyncpg
from yarl import URL

from queen.errors import DatabaseUnavailable
from queen.http.auth.forwarded import came_by_https
from queen.http.auth.principal import ROLES, Principal
from queen.http.server.message import Handler, Request, Response
from queen.http.server.router import Generations
from queen.proxy.login import COOKIE, Asked, Login, Reply, read_cookies
from queen.proxy.sessions import Identity
from queen.proxy.settings import ProxySettings
from queen.proxy.users import UserStore
from queen.settings import Settings
from queen.storage.database import unavailable_reason

_LOOK_SECONDS = 15.0
"""How often the sessions of connections are checked."""


_PROGRAMS: Final = "/api/"
_DECIDING: Final = (b"cookie", b"host", b"origin", b"sec-fetch-site", b"authorization", b"x-csrf-token", b"upgrade")
_KNOWN_SENDERS: Final = 1024

Sender = tuple[bytes | None, ...]


class Session:
    """Whether a session goes on."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.is_live = True


class ServerLogin:
    """Serves the routes of logging in beside those of the server, and identifies users by their cookies."""

    def __init__(self, settings: Settings, dsn: str) -> None:
        self._secure = bool(settings.tls_cert)
        self._dsn = dsn
        self._settings = ProxySettings.inside(settings, dsn)
        self._pool: asyncpg.Pool[asyncpg.Record]
        self._login: Login
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._known: Generations[Sender, tuple[str, Identity, Principal]] = Generations(_KNOWN_SENDERS)
        self._watching: asyncio.Task[None]

    async def start(self) -> None:
        self._pool = await asyncpg.create_pool(self._dsn, min_size=0, max_size=2, timeout=10)
        self._login = Login(self._settings, UserStore(self._pool))
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        self._watching.cancel()
        await self._pool.close()

    def before(self, pages: Handler) -> Handler:
        """The handler of paths without a route: the login pages, and `pages` for users who are logged in."""

        async def serve(request: Request) -> Response:
            asked = self._asked(request)
            try:
                if self._login.is_own(asked.path):
                    return _response(await self._login.answer(asked))
                if asked.wants_page and await self._login.identify(asked) is None:
                    return _response(self._login.unauthenticated(asked))
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                raise DatabaseUnavailable(f"PostgreSQL is unavailable: {unavailable_reason(error)}") from error
            answer = pages(request)
            return answer if isinstance(answer, Response) else await answer

        return serve

    def may_be_session(self, request: Request) -> bool:
        """Whether a request has the cookie of a session, which may have ended."""
        return self._login.sessions.is_issued(self._asked(request).cookies.get(COOKIE, ""))

    async def identify(self, request: Request, token: bytes | None) -> Principal | Response | None:
        """Whose session a token is, else the cookie; a refusal where another site sent it; None without one."""
        asked = self._asked(request)
        shown = token.decode("latin-1") if token is not None else asked.cookies.get(COOKIE)
        if not shown:
            return None
        try:
            identity = await self._login.sessions.identify(shown)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise DatabaseUnavailable(f"PostgreSQL is unavailable: {unavailable_reason(error)}") from error
        if identity is None or not identity.is_session:
            # The token of a program opens what it is limited to, which is checked where it comes in `Authorization`.
            return None
        refused = self._login.refuse_forgery(asked, identity) if token is None else None
        if refused is not None:
            return _response(refused)
        principal = Principal(identity.username, ROLES[identity.role], expires=identity.expires)
        if request.route is not None and request.route.holds_connection:
            session = Session(shown)
            self._sessions.add(session)
            return dataclasses.replace(principal, is_live=lambda: session.is_live)
        if request.path.startswith(_PROGRAMS):
            self._known.put(_sender(request, token), (shown, identity, principal))
        return principal

    def recall(self, request: Request, token: bytes | None) -> Principal | None:
        """Who sent a request with the same credentials a moment ago; None: they have to be verified again."""
        if not request.path.startswith(_PROGRAMS) or (request.route is not None and request.route.holds_connection):
            return None
        known = self._known.get(_sender(request, token))
        if known is None or self._login.sessions.recall(known[0]) is not known[1]:
            return None
        return known[2]

    async def _watch(self) -> None:
        """Check now and then whether the sessions behind long-lived connections have ended."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for session in list(self._sessions):
                with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    session.is_live = await self._login.sessions.identify(session.token) is not None

    def _came_by_https(self, headers: Mapping[str, str]) -> bool:
        return came_by_https(headers.get("x-forwarded-proto", ""), self._settings.trusted_proxies, self._secure)

    def _asked(self, request: Request) -> Asked:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()}
        return Asked(
            request.method,
            URL(request.path, encoded=True).path,
            request.query,
            headers,
            read_cookies(headers.get("cookie", "")),
            request.peer,
            self._came_by_https(headers),
            request.body,
        )


def _sender(request: Request, token: bytes | None) -> Sender:
    """Everything that identifies the user of a request, and whether another site may have sent it."""
    if token is not None:
        return (token,)
    get = request.headers.get
    return request.method.encode(), *[get(name) for name in _DECIDING]


def _response(reply: Reply) -> Response:
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in reply.headers.items()]
    headers += [(b"Set-Cookie", cookie.encode()) for cookie in reply.cookies]
    return Response(reply.status, reply.body, reply.content_type.encode(), tuple(headers))
