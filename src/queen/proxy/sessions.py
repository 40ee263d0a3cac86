"""Sessions: the tokens that users get when they log in, and the identity behind a token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from queen.errors import SettingsError
from queen.http.auth.keys import KeyRing, read_secret
from queen.http.auth.principal import ClaimNames, KeyUnknown, TokenRefused, Verified
from queen.http.auth.tokens import TokenVerifier
from queen.http.server.message import Access
from queen.proxy.settings import ProxySettings
from queen.proxy.users import User, UserStore

# A session that was revoked may be used this much longer.
_LIVE_SECONDS: Final = 5.0
_MOST_REMEMBERED: Final = 10_000
_ALGORITHM_OF: Final[Mapping[type[Key], str]] = {RSAKey: "RS256", OKPKey: "EdDSA", ECKey: "ES256"}
_NO_ROLE: Final = "none"
_SCOPES: Final = ("scopes", "allowed_namespaces")
_ROLE_OF: Final = {Access.ADMIN: "admin", Access.READ_WRITE: "read-write", Access.READ_ONLY: "read-only"}


@dataclass(frozen=True, slots=True)
class Identity:
    """The sender of a request, and the token that identifies it."""

    username: str
    role: str
    token: str
    email: str | None = None
    subject: str | None = None
    groups: tuple[str, ...] = ()
    external: bool = False
    is_session: bool = False
    """Whether it was issued by a login; otherwise it is the token of a program, with the limits of that token."""
    jti: str | None = None
    expires: float = float("inf")
    """In seconds since 1970."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The claims of its token that limit what its bearer may touch."""

    def may_send(self, method: str) -> bool:
        """Whether it may send requests of this method at all; the server decides about each route."""
        if self.role in ("admin", "read-write") or any(name in self.limits for name in _SCOPES):
            return True
        return self.role == "read-only" and method.upper() in ("GET", "HEAD", "OPTIONS")


class Sessions:
    """Issues sessions and recognises them; and tokens of the identity provider, where there is one."""

    def __init__(self, settings: ProxySettings, users: UserStore) -> None:
        self._settings = settings
        self._users = users
        ring = KeyRing.of("HS256", settings.jwt_secret, "", "")
        self._own = TokenVerifier(ring, settings.claim_names)
        self._programs = TokenVerifier(
            ring, settings.claim_names, issuers=settings.jwt_issuer, audiences=settings.jwt_audience
        )
        self._key = read_secret(settings.jwt_secret)
        self.external = _external(settings)
        self._live: OrderedDict[str, tuple[float, User | None]] = OrderedDict()
        self._recent: OrderedDict[str, tuple[float, Identity]] = OrderedDict()
        self._changes = 0
        self._internal_key, self._internal_algorithm = internal_key(settings)

    async def begin(self, user: User, address: str, description: str = "login", seconds: int | None = -1) -> str:
        """A token for a user; `seconds` None: it never expires."""
        lifetime = self._settings.session_seconds if seconds == -1 else seconds
        jti, now = secrets.token_urlsafe(24), int(time.time())
        expires = datetime.fromtimestamp(now + lifetime, UTC) if lifetime is not None else None
        await self._users.begin_session(user, jti, expires, address, description)
        claims: dict[str, Any] = {
            "id": user.id,
            "sub": user.username,
            "username": user.username,
            "iat": now,
            "jti": jti,
            **self._stamp(user),
        }
        if user.email:
            claims["email"] = user.email
        if lifetime is not None:
            claims["exp"] = now + lifetime
        return jwt.encode({"alg": "HS256"}, claims, self._key)

    def _stamp(self, user: User) -> dict[str, str]:
        """The claims by which a server knows that a token is for it, and what its bearer may do."""
        settings, names = self._settings, self._settings.claim_names
        role = {"admin": names.admin, "read-write": names.read_write, "read-only": names.read_only}[user.role]
        stamp = {"role": user.role, names.role: role}
        if settings.jwt_issuer:
            stamp["iss"] = settings.jwt_issuer[0]
        if settings.jwt_audience:
            stamp["aud"] = settings.jwt_audience[0]
        return stamp

    async def end(self, identity: Identity) -> None:
        if identity.jti is not None:
            await self._users.revoke_session(identity.jti)
            self._changes += 1
            self._live.pop(identity.jti, None)
            self._recent.clear()

    def forget(self) -> None:
        """Look every session up again."""
        self._changes += 1
        self._live.clear()
        self._recent.clear()

    def is_issued(self, token: str) -> bool:
        """Whether a token is one of a session, by what it says itself."""
        try:
            return "username" in self._own.check(token.encode()).claims
        except (TokenRefused, UnicodeEncodeError):
            return False

    def recall(self, token: str) -> Identity | None:
        """The user of a token that was verified a moment ago; None: it has to be verified again."""
        known = self._recent.get(token)
        if known is None:
            return None
        if time.monotonic() < known[0]:
            return known[1]
        del self._recent[token]
        return None

    async def identify(self, token: str) -> Identity | None:
        """The user of this token; None when it is not valid."""
        changes = self._changes
        identity = await self._identify(token)
        # A session that has ended since it was looked up is not remembered.
        if identity is not None and changes == self._changes:
            until = time.monotonic() + min(_LIVE_SECONDS, identity.expires - time.time())
            self._recent[token] = until, identity
            if len(self._recent) > _MOST_REMEMBERED:
                self._recent.popitem(last=False)
        return identity

    async def _identify(self, token: str) -> Identity | None:
        if self.external is not None:
            found = await self._identify_external(token)
            if found is not None:
                return found
        try:
            verified = self._own.check(token.encode())
        except (TokenRefused, UnicodeEncodeError):
            return None
        claims = verified.claims
        jti, username = claims.get("jti"), claims.get("username")
        if username is None:
            return self._program(token)
        if not isinstance(username, str):
            return None
        if jti is None:
            if self._is_minted(claims):
                return None
            # Of an earlier proxy, which kept no sessions: valid until it expires, as long as the user is.
            user = await self._user(f"name:{username}", self._users.by_name, username)
        else:
            user = await self._user(str(jti), self._users.live_session, str(jti))
        if user is None or user.disabled or user.username != username:
            return None
        stamp = self._stamp(user)
        if any(claims.get(name) != value for name, value in stamp.items()):
            # The role of the user has changed, or the server requires more; it reads both from the token.
            token = jwt.encode({"alg": "HS256"}, {**claims, **stamp}, self._key)
        return Identity(
            user.username,
            user.role,
            token,
            user.email,
            user.username,
            is_session=True,
            jti=str(jti) if jti else None,
            expires=verified.principal.expires,
        )

    def _program(self, token: str) -> Identity | None:
        """The bearer of a token of `queen token create`: it has no session, and is valid until it expires."""
        try:
            verified = self._programs.check(token.encode())
        except TokenRefused:
            return None
        if self._is_minted(verified.claims):
            return None
        principal = verified.principal
        return Identity(
            principal.subject or "unknown",
            _ROLE_OF.get(principal.access, _NO_ROLE),
            token,
            subject=principal.subject,
            expires=principal.expires,
            limits=self._limits(verified),
        )

    def _is_minted(self, claims: Mapping[str, Any]) -> bool:
        """Whether a token was made for services behind another proxy, and not for coming back here."""
        return bool(claims.get("iss") == self._settings.internal_issuer)

    def _limits(self, verified: Verified) -> dict[str, Any]:
        names = self._settings.claim_names
        limiting = (names.queues, names.namespaces, names.groups, *_SCOPES)
        return {name: verified.claims[name] for name in limiting if name in verified.claims}

    def csrf_token(self, identity: Identity) -> str:
        """The token that a page has to send with every change."""
        # Sessions of an earlier proxy have no id: one of them must not know the token of all others.
        session = identity.jti or identity.token
        return hmac.new(self._settings.jwt_secret.encode(), f"csrf {session}".encode(), hashlib.sha256).hexdigest()

    def mint(self, identity: Identity) -> str:
        """A short-lived token for services behind a proxy that uses forward authentication."""
        settings, now = self._settings, int(time.time())
        source = {
            "sub": identity.subject or identity.username,
            "role": identity.role if identity.role != _NO_ROLE else None,
            "email": identity.email,
            "username": identity.username,
        }
        expires = int(min(now + settings.internal_seconds, identity.expires))
        claims: dict[str, Any] = {"iss": settings.internal_issuer, "iat": now, "exp": expires}
        if settings.internal_audience:
            claims["aud"] = settings.internal_audience
        claims |= {claim: source[field] for claim, field in settings.internal_claims if source.get(field) is not None}
        # It opens no more than what it stands for.
        claims |= identity.limits
        header: dict[str, Any] = {"alg": self._internal_algorithm}
        if not isinstance(self._internal_key, OctKey):
            header["kid"] = self._internal_key.thumbprint()
        return jwt.encode(header, claims, self._internal_key, algorithms=[self._internal_algorithm])

    def jwks(self) -> dict[str, list[dict[str, Any]]]:
        """The public key that verifies what is minted; none for a shared secret."""
        if isinstance(self._internal_key, OctKey):
            return {"keys": []}
        public: dict[str, Any] = dict(self._internal_key.as_dict(private=False))
        return {
            "keys": [public | {"kid": self._internal_key.thumbprint(), "use": "sig", "alg": self._internal_algorithm}]
        }

    async def _identify_external(self, token: str) -> Identity | None:
        verifier = self.external
        assert verifier is not None
        try:
            verified = verifier.check(token.encode())
        except KeyUnknown as unknown:
            if not await verifier.keys.refetch_for(unknown.algorithm, unknown.kid):
                return None
            try:
                verified = verifier.check(token.encode())
            except TokenRefused:
                return None
        except (TokenRefused, UnicodeEncodeError):
            return None
        claims = verified.claims
        subject = verified.principal.subject
        name = claims.get("preferred_username") or claims.get("username") or subject or "unknown"
        groups = claims.get("groups")
        return Identity(
            str(name),
            _ROLE_OF.get(verified.principal.access, "read-only"),
            token,
            claims["email"] if isinstance(claims.get("email"), str) else None,
            subject,
            tuple(str(group) for group in groups) if isinstance(groups, list) else (),
            external=True,
            expires=verified.principal.expires,
            limits=self._limits(verified),
        )

    async def _user(self, key: str, find: Any, argument: str) -> User | None:
        now = time.monotonic()
        known = self._live.get(key)
        if known is not None and now < known[0]:
            return known[1]
        changes = self._changes
        user: User | None = await find(argument)
        if changes == self._changes:
            self._live[key] = (now + _LIVE_SECONDS, user)
            self._live.move_to_end(key)
            if len(self._live) > _MOST_REMEMBERED:
                self._live.popitem(last=False)
        return user


def _external(settings: ProxySettings) -> TokenVerifier | None:
    if not settings.external_jwks_url:
        return None
    return TokenVerifier(
        KeyRing.of("auto", "", "", settings.external_jwks_url),
        # Claims of other providers do not limit requests here: the server reads those.
        ClaimNames(queues="", namespaces="", groups=""),
        issuers=settings.external_issuer,
        audiences=settings.external_audience,
    )


def internal_key(settings: ProxySettings) -> tuple[Key, str]:
    """What tokens for services are signed with, and how; raises `SettingsError`."""
    if not settings.internal_key_pem:
        return OctKey.import_key(settings.internal_secret or settings.jwt_secret), "HS256"
    for kind in (RSAKey, OKPKey, ECKey):
        try:
            key: Key = kind.import_key(settings.internal_key_pem)
            algorithm = "ES384" if isinstance(key, ECKey) and key.curve_name == "P-384" else _ALGORITHM_OF[kind]
            # Keys that only verify, and curves that no algorithm is for, would fail at the first request.
            jwt.encode({"alg": algorithm}, {}, key, algorithms=[algorithm])
        except (JoseError, ValueError, TypeError):
            continue
        return key, algorithm
    raise SettingsError(
        "INTERNAL_JWT_PRIVATE_KEY_PEM: expected an RSA, EC (P-256 or P-384) or Ed25519 private key in PEM"
    )
