"""Logging in, whichever server handles the HTTP: pages, sessions, sign-in, ForwardAuth."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from joserfc import jwt
from joserfc.jwk import OctKey

from queen.http.auth.browser import API_PREFIXES, is_same_host
from queen.http.auth.keys import KeyRing
from queen.http.auth.principal import ClaimNames, TokenRefused
from queen.http.auth.tokens import TokenVerifier
from queen.proxy.oidc import FLOW_SECONDS, Flow, OpenId, SignInFailed
from queen.proxy.passwords import Passwords, is_outdated
from queen.proxy.sessions import Identity, Sessions
from queen.proxy.settings import ProxySettings
from queen.proxy.users import User, UserStore, is_username

COOKIE: Final = "token"
_FLOW_COOKIE: Final = "queen_flow"
_DAY: Final = 86_400
_FAILURES_PER_MINUTE: Final = 20
_MOST_WAITING: Final = 100
# Failed logins are answered after a multiple of it.
_BEAT_SECONDS = 0.25
_LARGEST_FORM: Final = 8192
_CALLBACKS: Final = frozenset({"/api/auth/google/callback", "/api/oauth/callback/google", "/api/auth/callback/google"})
_SHORT_PATHS: Final = frozenset({"/dequeue", "/topics", "/dlq", "/sqs"})
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Asked:
    """A request about logging in."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """By lower-case name."""
    cookies: Mapping[str, str]
    address: str
    secure: bool = False
    body: bytes = b""

    @property
    def host(self) -> str:
        return self.headers.get("host", "")

    @property
    def is_for_programs(self) -> bool:
        """Whether the path is one of the API, which no person opens."""
        # A slash at the end changes nothing for the server.
        path = self.path.removesuffix("/")
        return path.startswith((*API_PREFIXES, "/sqs/")) or path in _SHORT_PATHS

    @property
    def wants_page(self) -> bool:
        """Whether a person with a browser asks, rather than a script of a page or a program."""
        if self.method not in ("GET", "HEAD") or self.is_for_programs:
            return False
        return (
            "text/html" in self.headers.get("accept", "")
            and self.headers.get("x-requested-with", "").lower() != "xmlhttprequest"
        )


@dataclass(slots=True)
class Reply:
    """The answer to it."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    cookies: list[str] = field(default_factory=list)
    """Whole values of Set-Cookie."""


class Login:
    """Answers every route of logging in; None for paths that are not about it."""

    def __init__(self, settings: ProxySettings, users: UserStore) -> None:
        self.settings = settings
        self.users = users
        self.sessions = Sessions(settings, users)
        self._passwords = Passwords(settings.hashes_at_a_time)
        self._google = OpenId(settings.google, users, google=True) if settings.google is not None else None
        self._oidc = OpenId(settings.oidc, users) if settings.oidc is not None else None
        self._flow_key = OctKey.import_key(b"flow " + settings.jwt_secret.encode())
        self._flows = TokenVerifier(KeyRing(("HS256",), [self._flow_key]), ClaimNames(), issuers=["flow"], skew=0)
        self._failures: dict[str, list[float]] = {}
        self._pending: Counter[str] = Counter()
        """Logins that are being verified, by address: each may still fail."""
        self._page = files("queen.proxy").joinpath("login.html").read_bytes()
        self._page_headers = {"Content-Security-Policy": _content_policy(self._page), **_NO_STORE}

    def start(self) -> None:
        if self.sessions.external is not None:
            self.sessions.external.keys.start()

    async def stop(self) -> None:
        if self.sessions.external is not None:
            await self.sessions.external.keys.stop()

    def is_own(self, path: str) -> bool:
        """Whether a path is answered here rather than by the server behind."""
        return path in _PATHS or path in _CALLBACKS or path.startswith(("/api/auth/",))

    async def answer(self, asked: Asked) -> Reply:
        """The answer to a request whose path `is_own`."""
        path, method = asked.path, asked.method
        if path in ("/login", "/login.html") and method in ("GET", "HEAD"):
            return Reply(200, self._page, "text/html; charset=utf-8", dict(self._page_headers))
        if path == "/api/login" and method == "POST":
            return await self._login(asked)
        if path == "/api/logout" and method == "POST":
            return await self._logout(asked)
        if path == "/api/me" and method == "GET":
            return await self._me(asked)
        if path == "/api/auth/config" and method == "GET":
            return _json(200, self._config())
        if path in ("/.well-known/jwks.json", "/api/auth/jwks") and method == "GET":
            return _json(200, self.sessions.jwks(), {"Cache-Control": "public, max-age=300"})
        if path == "/api/auth/forward-auth":
            return await self._forward_auth(asked)
        if path in ("/api/auth/google", "/api/auth/oidc") and method == "GET":
            return await self._begin_flow(asked, path.rpartition("/")[2])
        if path in _CALLBACKS and method == "GET":
            return await self._finish_flow(asked, "google")
        if path == "/api/auth/oidc/callback" and method == "GET":
            return await self._finish_flow(asked, "oidc")
        return _json(404, {"error": "Not Found"})

    async def identify(self, asked: Asked) -> Identity | None:
        """The user of a request, by bearer token or by cookie."""
        token = login_token(asked)
        return await self.sessions.identify(token) if token else None

    def refuse_forgery(self, asked: Asked, identity: Identity) -> Reply | None:
        """The refusal of a cross-site request, which a page of another site makes a browser send with its cookie."""
        if bearer_of(asked) or COOKIE not in asked.cookies:
            return None
        origin, site = asked.headers.get("origin"), asked.headers.get("sec-fetch-site")
        if asked.method in ("GET", "HEAD", "OPTIONS") and asked.headers.get("upgrade", "").lower() != "websocket":
            # Links of other sites may open pages; a GET for anything else may take messages. Older browsers say only
            # the origin.
            linked = site in ("cross-site", "same-site")
            called = origin is not None and not is_same_host(origin, asked.host)
            own = not (linked or called) or not asked.is_for_programs
        elif origin is not None:
            own = is_same_host(origin, asked.host)
        else:
            own = site in ("same-origin", "none")
        sent = asked.headers.get("x-csrf-token", "")
        if own or (sent and hmac.compare_digest(sent.encode(), self.sessions.csrf_token(identity).encode())):
            return None
        log.warning("%s %s from %s refused: it comes from another site", asked.method, asked.path, asked.address)
        return _json(403, {"error": "Insufficient permissions", "detail": "the request comes from another site"})

    def unauthenticated(self, asked: Asked) -> Reply:
        """The response to a client that is not logged in."""
        if asked.wants_page:
            target = quote(asked.path) + (f"?{urlencode(asked.query)}" if asked.query else "")
            back = "" if target == "/" else f"?redirect_uri={quote(target, safe='')}"
            return Reply(302, headers={"Location": f"/login{back}", **_NO_STORE})
        shown = COOKIE in asked.cookies or "authorization" in asked.headers
        text = "Invalid or expired token" if shown else "Authentication required"
        return _json(401, {"error": text}, {"WWW-Authenticate": 'Bearer realm="queen"'})

    async def _login(self, asked: Asked) -> Reply:
        began = time.monotonic()
        try:
            form = msgspec.json.decode(asked.body[:_LARGEST_FORM], type=_LoginForm)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            form = _LoginForm()
        if not form.username or not form.password:
            return _json(400, {"error": "Username and password required"})
        if not asked.headers.get("content-type", "").startswith("application/json"):
            # A form on another site must not be able to log a user in under another account.
            return _json(415, {"error": "Content-Type must be application/json"})
        if self._is_throttled(asked.address):
            return _json(429, {"error": "Too many failed logins; try again in a minute"}, {"Retry-After": "60"})
        if self._passwords.waiting >= _MOST_WAITING:
            return _json(503, {"error": "Too many logins at the same time; try again"}, {"Retry-After": "1"})
        self._pending[asked.address] += 1
        try:
            user = await self._user_of(form, asked)
        finally:
            self._pending[asked.address] -= 1
            if not self._pending[asked.address]:
                del self._pending[asked.address]
        if user is None:
            # Counted as failed in the moment in which it is no longer pending: never twice.
            self._failures.setdefault(asked.address, []).append(time.monotonic())
            # Whatever was wrong, and whether there is such a user: it takes as long.
            await asyncio.sleep(_BEAT_SECONDS - (time.monotonic() - began) % _BEAT_SECONDS)
            return _json(401, {"error": "Invalid credentials"})
        token = await self.sessions.begin(user, asked.address)
        await self.users.audit(user.username, asked.address, "login", user.username)
        redirect = form.redirect_uri if self.is_safe_redirect(form.redirect_uri, asked) else None
        reply = _json(
            200,
            {
                "success": True,
                "user": {"username": user.username, "role": user.role},
                "redirect_uri": redirect,
            },
            dict(_NO_STORE),
        )
        reply.cookies.append(self._cookie(COOKIE, token, asked, self.settings.session_seconds or 365 * _DAY))
        return reply

    async def _user_of(self, form: _LoginForm, asked: Asked) -> User | None:
        """The user who logs in; None where name or password are wrong, or the user may not."""
        user = await self.users.by_name(form.username) if is_username(form.username) else None
        good = await self._passwords.verify(form.password, user.password_hash if user is not None else None)
        if user is None or not good or user.disabled or user.is_locked:
            if user is not None and not good and not user.is_locked:
                await self.users.login_failed(user)
            why = "wrong name or password"
            if user is not None and (user.is_locked or (good and user.disabled)):
                why = "the user is locked" if user.is_locked else "the user is disabled"
            await self._failed(asked, form.username, why)
            return None
        await self.users.login_succeeded(user)
        assert user.password_hash is not None
        if is_outdated(user.password_hash):
            await self.users.set_password(user, await self._passwords.hash(form.password))
        return user

    async def _failed(self, asked: Asked, username: str, why: str) -> None:
        log.warning("login as %r from %s failed: %s", username[:100], asked.address, why)
        await self.users.audit(None, asked.address, "login failed", username[:100].replace("\0", "\\0"))

    def _is_throttled(self, address: str) -> bool:
        since = time.monotonic() - 60
        if len(self._failures) > 10_000:
            self._failures = {key: times for key, times in self._failures.items() if times[-1] > since}
        recent = [moment for moment in self._failures.get(address, ()) if moment > since]
        if recent:
            self._failures[address] = recent
        else:
            self._failures.pop(address, None)
        return len(recent) + self._pending[address] >= _FAILURES_PER_MINUTE

    async def _logout(self, asked: Asked) -> Reply:
        identity = await self.identify(asked)
        if identity is not None:
            refused = self.refuse_forgery(asked, identity)
            if refused is not None:
                return refused
            await self.sessions.end(identity)
            await self.users.audit(identity.username, asked.address, "logout", identity.username)
        reply = _json(200, {"success": True}, dict(_NO_STORE))
        reply.cookies.append(self._cookie(COOKIE, "", asked, 0))
        return reply

    async def _me(self, asked: Asked) -> Reply:
        identity = await self.identify(asked)
        if identity is None:
            return self.unauthenticated(asked)
        body = {"username": identity.username, "role": identity.role, "csrfToken": self.sessions.csrf_token(identity)}
        return _json(200, body, dict(_NO_STORE))

    def _config(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "google": {
                "enabled": self._google is not None,
                "hasEmailAllowlist": bool(settings.google and settings.google.allowed_emails),
            },
            "oidc": {"enabled": self._oidc is not None, "name": settings.oidc.name if settings.oidc else None},
            "forwardAuth": {
                "enabled": settings.forward_auth,
                "allowedRedirectHosts": list(settings.forward_auth_redirect_hosts),
                "cookieDomain": settings.cookie_domain or None,
            },
        }

    # Signing in with a provider.

    async def _begin_flow(self, asked: Asked, kind: str) -> Reply:
        provider = self._google if kind == "google" else self._oidc
        if provider is None:
            return _json(503, {"error": f"Signing in with {kind} is not configured"})
        flow = Flow.begin()
        try:
            url = await provider.authorization_url(flow)
        except SignInFailed as failed:
            return self._back_to_login(asked, failed)
        following = asked.query.get("next", "")
        kept = jwt.encode(
            {"alg": "HS256"},
            {
                "iss": "flow",
                "kind": kind,
                "state": flow.state,
                "nonce": flow.nonce,
                "verifier": flow.verifier,
                "next": following if self.is_safe_redirect(following, asked) else "/",
                "exp": int(time.time()) + FLOW_SECONDS,
            },
            self._flow_key,
        )
        reply = Reply(302, headers={"Location": url, **_NO_STORE})
        reply.cookies.append(self._cookie(_FLOW_COOKIE, kept, asked, FLOW_SECONDS))
        return reply

    async def _finish_flow(self, asked: Asked, kind: str) -> Reply:
        provider = self._google if kind == "google" else self._oidc
        if provider is None:
            return _json(503, {"error": f"Signing in with {kind} is not configured"})
        try:
            kept = self._flows.check(asked.cookies.get(_FLOW_COOKIE, "").encode()).claims
            state = str(kept["state"])
            sent = asked.query.get("state", "")
            if kept["kind"] != kind or not hmac.compare_digest(state.encode(), sent.encode(errors="replace")):
                raise SignInFailed("invalid_state", "the state is another")
            if "code" not in asked.query:
                raise SignInFailed("google_failed", f"the provider answered {asked.query.get('error', 'nothing')!r}")
            flow = Flow(state, str(kept["nonce"]), str(kept["verifier"]))
            user = await provider.finish(flow, asked.query["code"])
        except TokenRefused as refused:
            return self._back_to_login(asked, SignInFailed("invalid_state", refused.text))
        except SignInFailed as failed:
            return self._back_to_login(asked, failed)
        token = await self.sessions.begin(user, asked.address, f"login with {provider.provider.name}")
        await self.users.audit(user.username, asked.address, "login", user.username, {"provider": kind})
        reply = Reply(302, headers={"Location": str(kept["next"]), **_NO_STORE})
        reply.cookies.append(self._cookie(COOKIE, token, asked, self.settings.session_seconds or 365 * _DAY))
        reply.cookies.append(self._cookie(_FLOW_COOKIE, "", asked, 0))
        return reply

    def _back_to_login(self, asked: Asked, failed: SignInFailed) -> Reply:
        log.warning("sign-in from %s failed (%s): %s", asked.address, failed.code, failed)
        reply = Reply(302, headers={"Location": f"/login?error={failed.code}", **_NO_STORE})
        reply.cookies.append(self._cookie(_FLOW_COOKIE, "", asked, 0))
        return reply

    # For another proxy, which asks here before it passes a request on.

    async def _forward_auth(self, asked: Asked) -> Reply:
        settings = self.settings
        if not settings.forward_auth:
            return _json(404, {"error": "Not Found"})
        forwarded = {key: asked.headers.get(f"x-forwarded-{key}", "") for key in ("method", "proto", "host", "uri")}
        identity = await self.identify(asked)
        if identity is None:
            return self._send_to_login(asked, forwarded)
        method = forwarded["method"] or "GET"
        if asked.headers.get("x-forward-auth-rbac", "") == "method" and not identity.may_send(method):
            return _json(403, {"error": "Insufficient permissions"})
        by_cookie = not bearer_of(asked)
        token = self.sessions.mint(identity) if by_cookie or settings.forward_auth_always_mint else identity.token
        offered = {
            "authorization": ("Authorization", f"Bearer {token}"),
            "x-auth-user": ("X-Auth-User", identity.username),
            "x-auth-email": ("X-Auth-Email", identity.email or ""),
            "x-auth-sub": ("X-Auth-Sub", identity.subject or identity.username),
            "x-auth-role": ("X-Auth-Role", identity.role),
            "x-auth-groups": ("X-Auth-Groups", ",".join(identity.groups)),
        }
        wanted = {name.lower() for name in settings.forward_auth_headers}
        if narrowed := asked.headers.get("x-forward-auth-headers"):
            wanted &= {name.strip().lower() for name in narrowed.split(",")}
        headers = {name: _header_value(value) for key, (name, value) in offered.items() if key in wanted and value}
        return Reply(200, b"", headers=headers | _NO_STORE)

    def _send_to_login(self, asked: Asked, forwarded: Mapping[str, str]) -> Reply:
        settings = self.settings
        target = f"{forwarded['proto'] or 'https'}://{forwarded['host']}{forwarded['uri']}"
        login = f"https://{settings.auth_host or asked.host}/login"
        if forwarded["host"] and self.is_safe_redirect(target, asked):
            login += f"?redirect_uri={quote(target, safe='')}"
        if "text/html" in asked.headers.get("accept", "") and forwarded["method"] in ("GET", "HEAD", ""):
            return Reply(302, headers={"Location": login, **_NO_STORE})
        return _json(401, {"error": "Authentication required"}, {"X-Forward-Auth-Location": login})

    def is_safe_redirect(self, target: str | None, asked: Asked) -> bool:
        """Whether a redirect after the login is safe: a path here, or an allowed host."""
        if not target or any(ord(letter) < 33 for letter in target) or "\\" in target:
            return False
        if target.startswith("/"):
            return not target.startswith("//")
        try:
            parts = urlsplit(target)
            host = (parts.hostname or "").lower()
        except ValueError:
            return False
        if parts.scheme not in ("https", "http") or not host or parts.username is not None:
            return False
        if parts.scheme == "http" and (self.settings.secure_cookies or asked.secure):
            return False
        if host in (allowed.lower() for allowed in self.settings.forward_auth_redirect_hosts):
            return True
        domain = self.settings.cookie_domain.lstrip(".").lower()
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))

    def _cookie(self, name: str, value: str, asked: Asked, seconds: int) -> str:
        parts = [f"{name}={value}", "Path=/", f"Max-Age={seconds}", "HttpOnly", "SameSite=Lax"]
        if self.settings.secure_cookies or asked.secure:
            parts.append("Secure")
        if self.settings.cookie_domain and name == COOKIE:
            parts.append(f"Domain={self.settings.cookie_domain}")
        return "; ".join(parts)


class _LoginForm(msgspec.Struct):
    username: str = ""
    password: str = ""
    redirect_uri: str | None = None


_PATHS: Final = frozenset({"/login", "/login.html", "/api/login", "/api/logout", "/api/me", "/.well-known/jwks.json"})
_NO_STORE: Final = {"Cache-Control": "no-store"}


def _content_policy(page: bytes) -> str:
    """The Content-Security-Policy of a page, which allows the scripts and styles that it contains, and no others."""
    found = re.findall(rb"<(script|style)>(.*?)</\1>", page, re.DOTALL)
    sources = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
            for name, text in found
            if name == kind
        )
        for kind in (b"script", b"style")
    }
    return (
        f"default-src 'none'; script-src {sources[b'script']}; style-src {sources[b'style']}; connect-src 'self'; "
        "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    )


def login_token(asked: Asked) -> str | None:
    """The token that a request carries: as a bearer, or in its cookie."""
    return bearer_of(asked) or asked.cookies.get(COOKIE)


def bearer_of(asked: Asked) -> str:
    scheme, _, token = asked.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def read_cookies(header: str) -> dict[str, str]:
    """Cookies by name. Those that other programs of the same host have set may be anything, and spoil no other."""
    pairs = (cookie.partition("=") for cookie in header.split(";"))
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _json(status: int, value: object, headers: dict[str, str] | None = None) -> Reply:
    return Reply(status, msgspec.json.encode(value), headers=headers or {})


def _header_value(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable()).encode("ascii", "replace").decode()
