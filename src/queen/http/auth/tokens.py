"""From a bearer token to its principal, or the reason why it is rejected."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from joserfc import jws
from joserfc.errors import JoseError

from queen.http.auth.keys import KeyRing
from queen.http.auth.principal import ClaimError, ClaimNames, KeyUnknown, Principal, TokenRefused, Verified
from queen.http.server.router import Generations
from queen.settings import Settings

LONGEST_TOKEN: Final = 16 * 1024
_CACHED_TOKENS: Final = 8192
# The key ring notices that a key was withdrawn; this bounds what it does not notice.
_LONGEST_CACHED_SECONDS: Final = 300.0


class TokenVerifier:
    """Verifies tokens, and remembers those it accepted by their hash."""

    def __init__(
        self,
        keys: KeyRing,
        names: ClaimNames,
        *,
        issuers: Sequence[str] = (),
        audiences: Sequence[str] = (),
        skew: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keys = keys
        self._names = names
        self._issuers = frozenset(issuers)
        self._audiences = frozenset(audiences)
        self._skew = skew
        self._clock = clock
        self._known: Generations[bytes, Verified] = Generations(_CACHED_TOKENS)
        self._registry = jws.JWSRegistry(algorithms=keys.algorithms, strict_check_header=False)
        self._registry.max_header_length = LONGEST_TOKEN
        self._registry.max_payload_length = LONGEST_TOKEN

    @classmethod
    def from_settings(cls, settings: Settings) -> TokenVerifier:
        """Raises `SettingsError` when there is no key that could verify a token."""
        return cls(
            KeyRing.from_settings(settings),
            ClaimNames.from_settings(settings),
            issuers=settings.jwt_issuer,
            audiences=settings.jwt_audience,
            skew=settings.jwt_clock_skew,
        )

    def verify(self, token: bytes) -> Principal:
        """The bearer of a token; raises `TokenRefused`."""
        return self.check(token).principal

    def check(self, token: bytes) -> Verified:
        """The same, with the claims."""
        digest = hashlib.sha256(token).digest()
        known = self._known.get(digest)
        now = self._clock()
        if known is not None and known.generation == self.keys.generation and now < known.until:
            return known
        verified = self._verify(token, now)
        self._known.put(digest, verified)
        return verified

    def forget(self) -> None:
        """Verify every token again."""
        self._known.clear()

    def _verify(self, token: bytes, now: float) -> Verified:
        if len(token) > LONGEST_TOKEN:
            raise TokenRefused("malformed", f"Token is longer than {LONGEST_TOKEN} bytes")
        header = _header(token)
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self.keys.algorithms:
            shown = algorithm[:20] if isinstance(algorithm, str) and algorithm.isprintable() else "no known algorithm"
            raise TokenRefused("algorithm", f"Token uses {shown}, expected {' or '.join(self.keys.algorithms)}")
        claims = self._claims(token, algorithm, kid if isinstance(kid, str) else None)
        until = self._check_times(claims, now)
        self._check_parties(claims)
        try:
            principal = dataclasses.replace(self._names.principal(claims), expires=until)
        except ClaimError as error:
            raise TokenRefused("claims", f"Invalid token: {error}") from error
        until = min(until, now + _LONGEST_CACHED_SECONDS)
        return Verified(principal, claims, until, self.keys.generation, algorithm.startswith("HS"))

    def _claims(self, token: bytes, algorithm: str, kid: str | None) -> dict[str, Any]:
        candidates = self.keys.candidates(algorithm, kid)
        if not candidates:
            raise KeyUnknown(algorithm, kid)
        for key in candidates:
            try:
                payload = jws.deserialize_compact(token, key, registry=self._registry).payload
            except (JoseError, ValueError, TypeError):
                continue
            return _json_object(payload, "claims are")
        if self.keys.may_refetch(algorithm, kid):
            raise KeyUnknown(algorithm, kid)
        raise TokenRefused("signature", "Invalid token signature")

    def _check_times(self, claims: Mapping[str, Any], now: float) -> float:
        """When the token ends, skew included."""
        expires, begins, issued = (_time(claims, name) for name in ("exp", "nbf", "iat"))
        if expires is not None and now >= expires + self._skew:
            raise TokenRefused("expired", "Token has expired")
        if begins is not None and now < begins - self._skew:
            raise TokenRefused("not_yet", "Token is not valid yet")
        if issued is not None and now < issued - self._skew:
            raise TokenRefused("not_yet", "Token was issued in the future")
        return expires + self._skew if expires is not None else float("inf")

    def _check_parties(self, claims: Mapping[str, Any]) -> None:
        issuer, audience = claims.get("iss"), claims.get("aud")
        if self._issuers and not (isinstance(issuer, str) and issuer in self._issuers):
            raise TokenRefused("issuer", "Invalid token issuer")
        if self._audiences:
            named = [audience] if isinstance(audience, str) else audience if isinstance(audience, list) else []
            if not any(isinstance(each, str) and each in self._audiences for each in named):
                raise TokenRefused("audience", "Invalid token audience")


def read_claims(token: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and claims of a token, unverified; raises `TokenRefused` when it is none."""
    return _header(token), _json_object(_decode_base64(token.split(b".")[1]), "claims are")


def _header(token: bytes) -> dict[str, Any]:
    head, _, rest = token.partition(b".")
    if rest.count(b".") != 1:
        raise TokenRefused("malformed", "Invalid token: expected three parts separated by dots")
    return _json_object(_decode_base64(head), "header is")


def _decode_base64(part: bytes) -> bytes:
    try:
        return base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except (binascii.Error, ValueError):
        return b""


def _json_object(text: bytes, which: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TokenRefused("malformed", f"Invalid token: its {which} not a JSON object")
    return value


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        raise TokenRefused("claims", f"Invalid token: the claim {name} is not a time")
    return float(value)
