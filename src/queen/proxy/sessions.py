"""Sessions: the tokens that users get when they log in, and the identity behind a token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from queen.errors import SettingsError
from queen.http.auth.keys import KeyRing
from queen.http.auth.principal import ClaimNames, KeyUnknown, TokenRefused, Verified
from queen.http.auth.tokens import TokenVerifier
from queen.http.server.message import Access
from queen.proxy.settings import ProxySettings
from queen.proxy.users import User, UserStore

# A session that was revoked may be used this much longer.
_LIVE_SECONDS: Final = 5.0
_MOST_REMEMBERED: Final = 10_000
_ROLE_OF: Final = {Access.ADMIN: "admin", Access.READ_WRITE: "read-write"}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request, and the token that says so."""

    username: str
    role: str
    token: str
    email: str | None = None
    subject: str | None = None
    groups: tuple[str, ...] = ()
    external: bool = False
    jti: str | None = None
    expires: float = float("inf")
    """In seconds since 1970."""


class Sessions:
    """Issues sessions and recognises them; and tokens of the identity provider, where there is one."""

    def __init__(self, settings: ProxySettings, users: UserStore) -> None:
        self._settings = settings
        self._users = users
        self._key = OctKey.import_key(settings.jwt_secret)
        self._own = TokenVerifier(KeyRing.of("HS256", settings.jwt_secret, "", ""), ClaimNames())
        self.external = _external(settings)
        self._live: OrderedDict[str, tuple[float, User | None]] = OrderedDict()
        self._recent: OrderedDict[str, tuple[float, Identity]] = OrderedDict()
        self._internal_key, self._internal_algorithm = _internal_key(settings)

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
            "role": user.role,
            "iat": now,
            "jti": jti,
        }
        if user.email:
            claims["email"] = user.email
        if lifetime is not None:
            claims["exp"] = now + lifetime
        return jwt.encode({"alg": "HS256"}, claims, self._key)

    async def end(self, identity: Identity) -> None:
        if identity.jti is not None:
            await self._users.revoke_session(identity.jti)
            self._live.pop(identity.jti, None)
            self._recent.clear()

    def forget(self) -> None:
        """Look every session up again."""
        self._live.clear()
        self._recent.clear()

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
        identity = await self._identify(token)
        if identity is not None:
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
            return self._program(token, verified)
        if not isinstance(username, str):
            return None
        if jti is None:
            # Of an earlier proxy, which kept no sessions: valid until it expires, as long as the user is.
            user = await self._user(f"name:{username}", self._users.by_name, username)
        else:
            user = await self._user(str(jti), self._users.live_session, str(jti))
        if user is None or user.disabled or user.username != username:
            return None
        if claims.get("role") != user.role:
            # The user has got another since; the server behind reads it off the token.
            token = jwt.encode({"alg": "HS256"}, {**claims, "role": user.role}, self._key)
        return Identity(
            user.username,
            user.role,
            token,
            user.email,
            user.username,
            jti=str(jti) if jti else None,
            expires=verified.principal.expires,
        )

    def _program(self, token: str, verified: Verified) -> Identity | None:
        """The user of a token of `queen token create`: it has no session, and is valid until it expires."""
        principal = verified.principal
        if verified.claims.get("iss") == self._settings.internal_issuer:
            # Made for services behind another proxy, and not for coming back here.
            return None
        role = _ROLE_OF.get(principal.access, "read-only")
        if principal.scopes is not None and role == "read-only":
            # What it may write is up to its scopes, which the server reads.
            role = "read-write"
        return Identity(
            principal.subject or "unknown", role, token, subject=principal.subject, expires=principal.expires
        )

    def csrf_token(self, identity: Identity) -> str:
        """What a page has to send along with what it changes."""
        return hmac.new(self._settings.jwt_secret.encode(), f"csrf {identity.jti}".encode(), hashlib.sha256).hexdigest()

    def mint(self, identity: Identity) -> str:
        """A short-lived token for services behind a proxy that uses forward authentication."""
        settings, now = self._settings, int(time.time())
        source = {
            "sub": identity.subject or identity.username,
            "role": identity.role,
            "email": identity.email,
            "username": identity.username,
        }
        claims: dict[str, Any] = {"iss": settings.internal_issuer, "iat": now, "exp": now + settings.internal_seconds}
        if settings.internal_audience:
            claims["aud"] = settings.internal_audience
        claims |= {claim: source[field] for claim, field in settings.internal_claims if source.get(field) is not None}
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
        )

    async def _user(self, key: str, find: Any, argument: str) -> User | None:
        now = time.monotonic()
        known = self._live.get(key)
        if known is not None and now < known[0]:
            return known[1]
        user: User | None = await find(argument)
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
        # Claims of other providers are not limits of ours: the server reads those.
        ClaimNames(queues="", namespaces="", groups=""),
        issuers=settings.external_issuer,
        audiences=settings.external_audience,
    )


def _internal_key(settings: ProxySettings) -> tuple[Key, str]:
    if not settings.internal_key_pem:
        return OctKey.import_key(settings.internal_secret or settings.jwt_secret), "HS256"
    for kind, algorithm in ((RSAKey, "RS256"), (OKPKey, "EdDSA")):
        try:
            return kind.import_key(settings.internal_key_pem), algorithm
        except (JoseError, ValueError, TypeError):
            continue
    try:
        key = ECKey.import_key(settings.internal_key_pem)
    except (JoseError, ValueError, TypeError):
        raise SettingsError("INTERNAL_JWT_PRIVATE_KEY_PEM: expected an RSA, EC or Ed25519 private key in PEM") from None
    return key, "ES384" if key.curve_name == "P-384" else "ES256"
