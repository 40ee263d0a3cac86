"""The check that every request passes before its handler: authentication and authorization."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Protocol

from queen.errors import BadRequest, SettingsError
from queen.http.auth import resources
from queen.http.auth.browser import API_PREFIXES, LOOPBACK_NAMES, BrowserRules, takes_messages
from queen.http.auth.principal import ROLES, KeyUnknown, Patterns, Principal, TokenRefused, Verified, is_session
from queen.http.auth.resources import QueueLookup
from queen.http.server.message import Access, Headers, Request, Response, Route, error_response, json_response
from queen.http.server.router import Generations
from queen.http.server.tls import ServerTls
from queen.settings import Settings

if TYPE_CHECKING:
    from queen.http.auth.tokens import TokenVerifier

Refusal = Response | None | Awaitable[Response | None]


class SessionLookup(Protocol):
    """Finds the session of a token or, where there is none, of a cookie."""

    def may_be_session(self, request: Request) -> bool:
        """Whether a request has the cookie of a session, which may have ended."""

    def recall(self, request: Request, token: bytes | None) -> Principal | None:
        """Who sent a request with the same credentials a moment ago; None: they have to be verified again."""

    async def identify(self, request: Request, token: bytes | None) -> Principal | Response | None:
        """A refusal where another site sent it; None where there is no such session."""


_CHALLENGE: Final = b'Bearer realm="queen"'
_INSUFFICIENT: Final = "Insufficient permissions"
_BEARER_PROTOCOL: Final = "bearer."
_KNOWN_HEADERS: Final = 1024
_LONGEST_KNOWN: Final = 4096

log = logging.getLogger(__name__)


def check_security(settings: Settings) -> None:
    """Raises `SettingsError` where settings ask for security that they do not give; warns where they ask for none."""
    if settings.queen_login and not settings.jwt_secret:
        raise SettingsError("QUEEN_LOGIN is true, but JWT_SECRET is not set: sessions are signed with it")
    if settings.queen_login and not settings.jwt_algorithm.startswith(("auto", "HS")):
        raise SettingsError(
            f"QUEEN_LOGIN is true, but JWT_ALGORITHM={settings.jwt_algorithm} does not admit its sessions, which are "
            "signed with JWT_SECRET: leave JWT_ALGORITHM unset"
        )
    if settings.queen_login and "*" in settings.cors_origins:
        raise SettingsError("CORS_ORIGINS=* and QUEEN_LOGIN=true exclude each other: name the origins")
    if settings.tls_client_auth != "off" and "*" in settings.cors_origins:
        # Browsers show certificates to whatever page asks, as they do with cookies.
        raise SettingsError("CORS_ORIGINS=* and TLS_CLIENT_AUTH exclude each other: name the origins")
    if settings.jwt_enabled or settings.queen_login:
        _verifier(settings)
    elif settings.jwt_secret or settings.jwt_public_key or settings.jwt_jwks_url:
        log.warning("a key for tokens is set, but JWT_ENABLED is not true: requests need no token")
    server_tls(settings)
    _check_client_certificates(settings)
    if settings.is_guarded and settings.queen_peers and not settings.queen_sync_secret:
        raise SettingsError(
            "QUEEN_PEERS needs QUEEN_SYNC_SECRET here: peers sign with it what they send, in place of tokens"
        )
    check_sqs_keys(settings)
    if openness := open_access_warning(settings):
        log.warning("%s", openness)


def check_sqs_keys(settings: Settings) -> None:
    """Raises `SettingsError` where SQS clients would be admitted without authentication."""
    if settings.queen_sqs and settings.is_guarded and not settings.queen_sqs_keys:
        raise SettingsError(
            "QUEEN_SQS is true and authentication is required, but QUEEN_SQS_KEYS is not set: "
            "clients of SQS sign with keys"
        )


def _verifier(settings: Settings) -> TokenVerifier:
    # Loaded where tokens are asked for, and not in every worker: its cryptography takes 5 MB.
    from queen.http.auth.tokens import TokenVerifier

    return TokenVerifier.from_settings(settings)


def _check_client_certificates(settings: Settings) -> None:
    """Settings that look as if certificates were asked for must not leave the server open."""
    if settings.tls_client_auth == "off":
        for variable, value in (
            ("TLS_CLIENT_CA", settings.tls_client_ca),
            ("TLS_CLIENT_ROLES", settings.tls_client_roles),
        ):
            if value:
                raise SettingsError(f"{variable} is set, but TLS_CLIENT_AUTH is off: set it to required or optional")
    if settings.tls_client_auth == "optional" and not settings.is_guarded:
        raise SettingsError(
            "TLS_CLIENT_AUTH=optional needs JWT_ENABLED=true or QUEEN_LOGIN=true: "
            "else a client without a certificate could do everything"
        )


def open_access_warning(settings: Settings) -> str:
    """A warning about a server, or paths of it, that need no authentication from other machines; else empty."""
    if settings.is_guarded and (skipped := [path for path in settings.jwt_skip_paths if path.startswith(API_PREFIXES)]):
        return f"JWT_SKIP_PATHS opens {', '.join(skipped)} to everyone who reaches port {settings.port}"
    if settings.is_guarded or settings.listen_host in LOOPBACK_NAMES:
        return ""
    return (
        f"authentication is off and HOST={settings.listen_host} is reachable from other machines: everyone who reaches "
        f"port {settings.port} may read, write and delete everything (set JWT_ENABLED=true, see docs/security.md)"
    )


def server_tls(settings: Settings) -> ServerTls | None:
    """TLS as the settings want it, None where they want none; raises `SettingsError` for what cannot be."""
    if settings.tls_cert and settings.tls_key:
        return ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca, settings.tls_client_auth)
    if settings.tls_cert or settings.tls_key:
        present, missing = ("TLS_CERT", "TLS_KEY") if settings.tls_cert else ("TLS_KEY", "TLS_CERT")
        raise SettingsError(f"{present} is set, but {missing} is not: TLS needs both")
    if settings.tls_client_auth != "off":
        raise SettingsError(f"TLS_CLIENT_AUTH={settings.tls_client_auth} needs TLS_CERT and TLS_KEY")
    return None


class CertificateRoles:
    """Who a client is by the certificate it has shown."""

    def __init__(self, settings: Settings) -> None:
        self._checked = settings.tls_client_auth != "off"
        self._roles = [(Patterns([name]), ROLES[role]) for name, role in settings.tls_client_roles]

    def principal(self, request: Request) -> Principal | None:
        """None for a client without a certificate. One whose name has no role may do nothing."""
        name = request.client_name
        if not self._checked or name is None:
            return None
        return Principal(name, max((role for names, role in self._roles if names.admits(name)), default=Access.PUBLIC))


class Guard:
    """Answers 401 and 403 in the place of handlers. Refusals are logged and counted by their reason."""

    def __init__(
        self,
        verifier: TokenVerifier | None,
        lookup: QueueLookup,
        browsers: BrowserRules,
        *,
        guarded: bool = True,
        skip_paths: tuple[str, ...] = (),
        certificate_principal: Callable[[Request], Principal | None] = lambda request: None,
    ) -> None:
        """Without a `verifier` clients are identified by certificates alone; if not `guarded`, all are admitted."""
        self._verifier = verifier
        self.browsers = browsers
        self._guarded = guarded
        self._lookup = lookup
        self._skipped = frozenset(skip_paths)
        self._skipped_below = tuple(path for path in skip_paths if path.endswith("/") and len(path) > 1)
        self._certificate_principal = certificate_principal
        self.sessions: SessionLookup | None = None
        """Where people log in at the server itself."""
        self._known: Generations[bytes, Verified] = Generations(_KNOWN_HEADERS)
        self.refused: Counter[str] = Counter()
        """How many requests were refused, by reason."""

    @classmethod
    def from_settings(cls, settings: Settings, lookup: QueueLookup, browsers: BrowserRules) -> Guard:
        """Raises `SettingsError` where the settings ask for security that they do not give."""
        return cls(
            _verifier(settings) if settings.jwt_enabled or settings.queen_login else None,
            lookup,
            browsers,
            guarded=settings.is_guarded,
            skip_paths=settings.jwt_skip_paths,
            certificate_principal=CertificateRoles(settings).principal,
        )

    def consumer_limits(self, request: Request) -> resources.ConsumerLimits | None:
        """What a client may consume over its WebSocket; None: everything, without an end."""
        if request.principal is None:
            return None

        def refused(detail: str) -> None:
            self._refuse(request, 403, "resource", _INSUFFICIENT, detail)

        return resources.ConsumerLimits(request.principal, self._lookup, refused)

    def start(self) -> None:
        if self._verifier is not None:
            self._verifier.keys.start()

    async def stop(self) -> None:
        if self._verifier is not None:
            await self._verifier.keys.stop()

    @property
    def problem(self) -> str:
        """Why good tokens may be refused; empty when they are not."""
        return self._verifier.keys.problem if self._verifier is not None else ""

    def __call__(self, request: Request) -> Refusal:
        """None, if the handler may serve; its bearer is then `request.principal`. Else the refusal."""
        headers = request.headers
        if request.method == "HEAD" and request.route is not None and takes_messages(request.route):
            return error_response(
                405, "HEAD is not allowed on a route that changes data", ((b"Allow", b"GET, OPTIONS"),)
            )
        if (b"origin" in headers or b"sec-fetch-site" in headers) and (
            refusal := self.browsers.check(request)
        ) is not None:
            self.refused["browser"] += 1
            return refusal
        if not self._guarded:
            return None
        route = request.route
        if route is None or route.access is Access.PUBLIC or self._is_skipped(request.path):
            return None
        header = headers.get(b"authorization")
        known = self._known.get(header) if header is not None else None
        if known is not None and known.generation == self._generation() and time.time() < known.until:
            return self._admit(request, route, known.principal)
        token = bearer_token(request)
        if token is None:
            principal = self._certificate_principal(request)
            if principal is None and self.sessions is not None and b"cookie" in headers:
                return self._check_session(request, route, self.sessions, None)
            if principal is None:
                return self._refuse(request, 401, "missing", "Authentication required")
            return self._admit(request, route, principal)
        if self._verifier is None:
            return self._refuse(request, 401, "malformed", "Tokens are not accepted here: JWT_ENABLED is not set")
        try:
            verified = self._verifier.check(token)
        except KeyUnknown as unknown:
            if self._verifier.keys.may_refetch(unknown.algorithm, unknown.kid):
                return self._verify_with_new_keys(request, route, token, unknown)
            return self._refuse_token(request, unknown)
        except TokenRefused as refused:
            return self._refuse_token(request, refused)
        if self.sessions is not None and is_session(verified):
            # It may have been ended, and its owner may have another role by now.
            return self._check_session(request, route, self.sessions, token)
        if header is not None and len(header) <= _LONGEST_KNOWN:
            # Clients send the same header again and again: it need not even be hashed.
            self._known.put(header, verified)
        return self._admit(request, route, verified.principal)

    def check_head(self, request: Request) -> Response | None:
        """The refusal of a request by its head alone; None: the body decides."""
        headers, route = request.headers, request.route
        if (b"origin" in headers or b"sec-fetch-site" in headers) and (
            refusal := self.browsers.check(request)
        ) is not None:
            self.refused["browser"] += 1
            return refusal
        if not self._guarded or route is None or route.access is Access.PUBLIC or self._is_skipped(request.path):
            return None
        token = bearer_token(request)
        if token is None:
            principal = self._certificate_principal(request)
            if principal is None:
                if self.sessions is not None and b"cookie" in headers and self.sessions.may_be_session(request):
                    return None
                return self._refuse(request, 401, "missing", "Authentication required")
        elif self._verifier is None:
            return self._refuse(request, 401, "malformed", "Tokens are not accepted here: JWT_ENABLED is not set")
        else:
            try:
                verified = self._verifier.check(token)
            except KeyUnknown:
                return None
            except TokenRefused as refused:
                return self._refuse_token(request, refused)
            if self.sessions is not None and is_session(verified):
                return None
            principal = verified.principal
        return self._check_role(request, route, principal)

    def _generation(self) -> int:
        return self._verifier.keys.generation if self._verifier is not None else 0

    def _check_session(self, request: Request, route: Route, sessions: SessionLookup, token: bytes | None) -> Refusal:
        known = sessions.recall(request, token)
        if known is not None:
            return self._admit(request, route, known)
        return self._look_up_session(request, route, sessions, token)

    async def _look_up_session(
        self, request: Request, route: Route, sessions: SessionLookup, token: bytes | None
    ) -> Response | None:
        found = await sessions.identify(request, token)
        if isinstance(found, Response):
            self.refused["browser"] += 1
            return found
        if found is None and token is not None:
            return self._refuse(request, 401, "revoked", "The session has ended")
        if found is None:
            return self._refuse(request, 401, "missing", "Authentication required")
        admitted = self._admit(request, route, found)
        return admitted if admitted is None or isinstance(admitted, Response) else await admitted

    async def _verify_with_new_keys(
        self, request: Request, route: Route, token: bytes, unknown: KeyUnknown
    ) -> Response | None:
        verifier = self._verifier
        assert verifier is not None
        await verifier.keys.refetch_for(unknown.algorithm, unknown.kid)
        try:
            principal = verifier.verify(token)
        except TokenRefused as refused:
            return self._refuse_token(request, refused)
        admitted = self._admit(request, route, principal)
        return admitted if admitted is None or isinstance(admitted, Response) else await admitted

    def _admit(self, request: Request, route: Route, principal: Principal) -> Refusal:
        refusal = self._check_role(request, route, principal)
        if refusal is not None:
            return refusal
        if principal.is_limited or _is_scoped(principal):
            return self._check_named(request, route, principal)
        return None

    def _check_role(self, request: Request, route: Route, principal: Principal) -> Response | None:
        request.principal, request.subject = principal, principal.subject
        if principal.access >= route.access or (_is_scoped(principal) and resources.is_about_topics(route)):
            return None
        return self._refuse(request, 403, "role", _INSUFFICIENT)

    async def _check_named(self, request: Request, route: Route, principal: Principal) -> Response | None:
        try:
            await resources.check(principal, route, resources.named_by(request, route), self._lookup)
        except BadRequest as error:
            return error_response(400, str(error))
        except resources.Refused as refused:
            return self._refuse(request, 403, "resource", _INSUFFICIENT, str(refused))
        return None

    def _is_skipped(self, path: str) -> bool:
        return path in self._skipped or (bool(self._skipped_below) and path.startswith(self._skipped_below))

    def _refuse_token(self, request: Request, refused: TokenRefused) -> Response:
        if isinstance(refused, KeyUnknown) and self._verifier is not None and self._verifier.keys.problem:
            # The token may be valid: the client should retry with it, not fetch another.
            return self._refuse(request, 503, "keys", "The keys of the identity provider are not available; try again")
        return self._refuse(request, 401, refused.reason, refused.text)

    def _refuse(self, request: Request, status: int, reason: str, text: str, detail: str = "") -> Response:
        self.refused[reason] += 1
        principal = request.principal
        log.log(
            logging.WARNING if status == 403 else logging.INFO,
            "%s %s from %s refused with %d: %s",
            request.method,
            request.path,
            request.peer,
            status,
            detail or text,
            extra={
                "fields": {
                    "method": request.method,
                    "path": request.path,
                    "peer": request.peer,
                    "status": status,
                    "reason": reason,
                    "subject": principal.subject if principal is not None else None,
                }
            },
        )
        headers: Headers = ()
        if status == 401:
            error = b"" if reason == "missing" else b', error="invalid_token", error_description="%b"' % _quoted(text)
            headers = ((b"WWW-Authenticate", _CHALLENGE + error),)
        elif status == 403:
            headers = ((b"WWW-Authenticate", _CHALLENGE + b', error="insufficient_scope"'),)
        elif status == 503:
            headers = ((b"Retry-After", b"5"),)
        if detail:
            return json_response(status, {"error": text, "detail": detail}, headers)
        return error_response(status, text, headers)


def bearer_token(request: Request) -> bytes | None:
    """The token of `Authorization: Bearer <token>`; for WebSockets and event streams also of the query.

    The word `Bearer` may be left out. A browser cannot set headers on these. It can offer the protocols
    `queen.v1` and `bearer.<token>`, or, where the token is no word that a protocol may be called by, ask for
    `?token=<token>`.
    """
    header = request.headers.get(b"authorization")
    if header is not None:
        token = header[7:].strip() if header[:7].lower() == b"bearer " else header.strip()
        if token:
            return token
    if request.route is None or not request.route.holds_connection:
        return None
    for offered in _offered_protocols(request):
        if offered.startswith(_BEARER_PROTOCOL) and len(offered) > len(_BEARER_PROTOCOL):
            return offered.removeprefix(_BEARER_PROTOCOL).encode("latin-1")
    return request.query.get("token", "").encode() or None


def _offered_protocols(request: Request) -> list[str]:
    """The subprotocols that the client of a WebSocket offers."""
    header = request.headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
    return [offered.strip() for offered in header.split(",") if offered.strip()]


def _is_scoped(principal: Principal) -> bool:
    """Whether scopes, and not its role, say what a token may do with topics."""
    return principal.scopes is not None and principal.access is not Access.ADMIN


def _quoted(text: str) -> bytes:
    return text.replace("\\", "").replace('"', "'").encode("ascii", "replace")
