"""The settings of the proxy, read once from the environment; docs/proxy.md lists them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from queen.errors import SettingsError
from queen.http.auth.principal import ClaimNames
from queen.settings import LogEncoding, LogLevel, Settings, look_up

GOOGLE = "https://accounts.google.com"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "y": 31_536_000}
_LIMITS = ("JWT_QUEUES_CLAIM", "JWT_NAMESPACES_CLAIM", "JWT_GROUPS_CLAIM")
_SHARED = ("PG_", "DATABASE", "LOG_", "JWT_ISSUER", "JWT_AUDIENCE", "JWT_ROLE", *_LIMITS)
_OF_SERVER = ("PG_", "DATABASE", "MAX_CONNECTIONS", "PORT", "JWT_JWKS_URL")
ROLE_NAMES = ("admin", "read-write", "read-only")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenIdProvider:
    """A provider people can sign in with."""

    name: str
    issuer: str
    client_id: str
    client_secret: str
    redirect_uri: str
    allowed_domains: tuple[str, ...] = ()
    allowed_emails: tuple[str, ...] = ()
    auto_provision: bool = False
    default_role: str = "read-only"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProxySettings:
    """Everything that can be set. Times are in seconds."""

    database_url: str
    jwt_secret: str = dataclasses.field(repr=False)
    jwt_issuer: tuple[str, ...] = ()
    jwt_audience: tuple[str, ...] = ()
    claim_names: ClaimNames = dataclasses.field(default_factory=ClaimNames)
    host: str = ""
    port: int = 3000
    queen_server_url: str = ""
    session_seconds: int | None = 86_400
    secure_cookies: bool = False
    cookie_domain: str = ""
    external_jwks_url: str = ""
    external_issuer: tuple[str, ...] = ()
    external_audience: tuple[str, ...] = ()
    google: OpenIdProvider | None = dataclasses.field(default=None, repr=False)
    oidc: OpenIdProvider | None = dataclasses.field(default=None, repr=False)
    forward_auth: bool = False
    forward_auth_headers: tuple[str, ...] = ("Authorization",)
    forward_auth_always_mint: bool = False
    forward_auth_redirect_hosts: tuple[str, ...] = ()
    auth_host: str = ""
    internal_key_pem: str = dataclasses.field(default="", repr=False)
    internal_secret: str = dataclasses.field(default="", repr=False)
    internal_issuer: str = "queen-proxy"
    internal_audience: str = ""
    internal_seconds: int = 900
    internal_claims: tuple[tuple[str, str], ...] = (
        ("sub", "sub"),
        ("role", "role"),
        ("email", "email"),
        ("preferred_username", "username"),
    )
    trusted_proxies: int = 0
    max_connections: int = 5_000
    max_connections_per_ip: int = 0
    hashes_at_a_time: int = 2
    """Passwords that are verified at the same time; not a variable."""
    log_level: LogLevel = "info"
    log_encoding: LogEncoding = "text"

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **overrides: Any) -> Self:
        """Raises `SettingsError` that names the variable and what was expected."""
        env = _Env(environ)
        # The database is named as it is for the server, and so is what stands in tokens.
        server = Settings.from_env({key: value for key, value in environ.items() if key.startswith(_SHARED)})
        # As it is: the server does not cut blanks off, either.
        secret = look_up(environ, "JWT_SECRET") or ""
        if not secret.strip():
            raise SettingsError("JWT_SECRET is not set: the proxy signs sessions with it (openssl rand -hex 32)")
        values: dict[str, Any] = {
            "database_url": server.database_dsns[0] if server.database_dsns else "",
            "jwt_secret": secret,
            "jwt_issuer": server.jwt_issuer,
            "jwt_audience": server.jwt_audience,
            "claim_names": ClaimNames.from_settings(server),
            "host": env.text("HOST"),
            "port": env.number("PORT", 3000),
            "queen_server_url": env.url("QUEEN_SERVER_URL"),
            "session_seconds": env.duration("JWT_EXPIRES_IN", "24h"),
            "secure_cookies": env.text("NODE_ENV") == "production" or env.flag("SECURE_COOKIES"),
            "cookie_domain": env.text("COOKIE_DOMAIN"),
            "external_jwks_url": env.url("EXTERNAL_JWKS_URL") or env.url("JWT_JWKS_URL"),
            "external_issuer": env.words("EXTERNAL_ISSUER"),
            "external_audience": env.words("EXTERNAL_AUDIENCE"),
            "google": _provider(env, "GOOGLE", "Google", GOOGLE),
            "oidc": _provider(env, "OIDC", env.text("OIDC_NAME") or "single sign-on", env.url("OIDC_ISSUER")),
            "forward_auth": env.flag("FORWARD_AUTH_ENABLED"),
            "forward_auth_headers": env.words("FORWARD_AUTH_EMIT_HEADERS") or ("Authorization",),
            "forward_auth_always_mint": env.flag("FORWARD_AUTH_ALWAYS_MINT"),
            "forward_auth_redirect_hosts": env.words("FORWARD_AUTH_ALLOWED_REDIRECT_HOSTS"),
            "auth_host": env.text("AUTH_HOST"),
            "internal_key_pem": env.text("INTERNAL_JWT_PRIVATE_KEY_PEM").replace("\\n", "\n"),
            "internal_secret": env.text("INTERNAL_JWT_SIGNING_KEY"),
            "internal_issuer": env.text("INTERNAL_JWT_ISSUER") or "queen-proxy",
            "internal_audience": env.text("INTERNAL_JWT_AUDIENCE"),
            "internal_seconds": env.short_duration("INTERNAL_JWT_EXPIRES_IN", "15m"),
            "trusted_proxies": env.number("TRUSTED_PROXIES", 0),
            "max_connections": env.number("MAX_CONNECTIONS", 5_000),
            "max_connections_per_ip": env.number("MAX_CONNECTIONS_PER_IP", 0),
            "log_level": server.log_level,
            "log_encoding": server.log_encoding,
        }
        if claims := env.text("INTERNAL_JWT_CLAIMS"):
            values["internal_claims"] = _claims(claims)
        return cls(**values | {key: value for key, value in overrides.items() if value is not None})

    @classmethod
    def inside(cls, server: Settings, database_url: str) -> Self:
        """Those of a server that people log in to itself; raises `SettingsError`, too."""
        # What it does with the tokens of an identity provider is said by JWT_JWKS_URL, and checked by its own routes.
        of_login = {variable: text for variable, text in server.to_env().items() if not variable.startswith(_OF_SERVER)}
        return cls.from_env(
            of_login,
            database_url=database_url,
            secure_cookies=bool(server.tls_cert) or None,
            queen_server_url="inside",
            # It counts as memory of the server, in every worker.
            hashes_at_a_time=1,
        )

    @property
    def listen_host(self) -> str:
        return self.host or "0.0.0.0"

    @property
    def forwards(self) -> bool:
        """Whether requests are forwarded to a server; if not, another proxy forwards them and only checks here."""
        return bool(self.queen_server_url)


def is_email(pattern: str, email: str) -> bool:
    """Whether an address is the one that is meant, or matches an expression between slashes."""
    if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
        return re.search(pattern[1:-1], email, re.IGNORECASE) is not None
    return pattern.lower() == email.lower()


def parse_duration(text: str, variable: str = "") -> int | None:
    """Seconds in a text such as `24h`, `7d` or `3600`; None for `never`."""
    if text == "never":
        return None
    found = re.fullmatch(r"(\d{1,9})([smhdy]?)", text)
    if found is None or not int(found[1]):
        raise SettingsError(f"{variable}={text}: expected a time such as 15m, 24h, 7d or 1y, or never")
    return int(found[1]) * _UNITS.get(found[2], 1)


class _Env:
    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, variable: str) -> str:
        return (look_up(self._environ, variable) or "").strip()

    def words(self, variable: str) -> tuple[str, ...]:
        text = self.text(variable)
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        if text and not words:
            # Read as no list at all, it would admit every address.
            raise SettingsError(f"{variable}={text}: expected words separated by commas")
        return words

    def emails(self, variable: str) -> tuple[str, ...]:
        """Addresses, or expressions between slashes."""
        words = self.words(variable)
        for word in words:
            try:
                is_email(word, "")
            except re.error as error:
                raise SettingsError(f"{variable}={word}: expected a regular expression: {error}") from None
        return words

    def flag(self, variable: str) -> bool:
        text = self.text(variable)
        if text not in ("", "true", "false", "1", "0"):
            raise SettingsError(f"{variable}={text}: expected true, 1, false, 0 or nothing")
        return text in ("true", "1")

    def number(self, variable: str, default: int) -> int:
        text = self.text(variable)
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and int(text) < 65_536):
            raise SettingsError(f"{variable}={text}: expected a whole number from 0 to 65535")
        return int(text)

    def duration(self, variable: str, default: str) -> int | None:
        return parse_duration(self.text(variable) or default, variable)

    def short_duration(self, variable: str, default: str) -> int:
        seconds = self.duration(variable, default)
        if seconds is None:
            raise SettingsError(f"{variable}=never: expected a time such as 15m: these tokens cannot be revoked")
        return seconds

    def url(self, variable: str) -> str:
        text = self.text(variable).rstrip("/")
        parts = urlsplit(text)
        if text and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise SettingsError(f"{variable}={text}: expected a URL that begins with http:// or https://")
        return text


def _provider(env: _Env, prefix: str, name: str, issuer: str) -> OpenIdProvider | None:
    client, secret, redirect = (env.text(f"{prefix}_{key}") for key in ("CLIENT_ID", "CLIENT_SECRET", "REDIRECT_URI"))
    if not (client or secret or redirect):
        return None
    # Public clients (PKCE alone) have no secret; Google's always do.
    if not (client and redirect and issuer and (secret or prefix != "GOOGLE")):
        needed = "_CLIENT_SECRET" if prefix == "GOOGLE" else "_ISSUER"
        raise SettingsError(f"{prefix}_CLIENT_ID, _REDIRECT_URI and {needed} belong together: one is missing")
    role = env.text(f"{prefix}_DEFAULT_ROLE") or "read-only"
    if role not in ROLE_NAMES:
        raise SettingsError(f"{prefix}_DEFAULT_ROLE={role}: expected one of {', '.join(ROLE_NAMES)}")
    return OpenIdProvider(
        name,
        issuer,
        client,
        secret,
        redirect,
        tuple(domain.lower() for domain in env.words(f"{prefix}_ALLOWED_DOMAINS")),
        env.emails(f"{prefix}_ALLOWED_EMAILS"),
        env.flag(f"{prefix}_AUTO_PROVISION"),
        role,
    )


def _claims(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(tuple(pair.split(":")) for pair in text.split(","))
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise SettingsError(f"INTERNAL_JWT_CLAIMS={text}: expected pairs such as sub:sub,role:role")
    return tuple((pair[0], pair[1]) for pair in pairs)
