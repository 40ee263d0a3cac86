"""The keys that tokens are verified with: from the settings, and from the JWKS of an identity provider."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey, import_key

from queen.errors import SettingsError
from queen.settings import Settings

# Which header algorithms each JWT_ALGORITHM admits. `none` and whatever else a token may claim are in no row.
ALGORITHMS: Final[Mapping[str, tuple[str, ...]]] = {
    "HS256": ("HS256",),
    "HS384": ("HS384",),
    "HS512": ("HS512",),
    "RS256": ("RS256", "RS384", "RS512"),
    "RS384": ("RS384",),
    "RS512": ("RS512",),
    "ES256": ("ES256",),
    "EdDSA": ("EdDSA", "Ed25519"),
    "auto": ("HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "EdDSA", "Ed25519"),
}
_KEY_TYPES: Final = {"HS": "oct", "RS": "RSA", "ES": "EC", "Ed": "OKP"}
_SHORT_SECRET_BYTES: Final = 32
_LARGEST_JWKS_BYTES: Final = 1 << 20
_MOST_JWKS_KEYS: Final = 100
_FETCH_SECONDS: Final = 10.0
# An unknown `kid` asks the provider again, but such ids can be made up without end.
_REFETCH_FLOOR_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 15.0

# RFC 9864 gave it a better name; identity providers still use the old one.
warnings.filterwarnings("ignore", "EdDSA is deprecated", SecurityWarning)
# `read_secret` says so itself, and what to do about it.
warnings.filterwarnings("ignore", "Key size should be", SecurityWarning)

log = logging.getLogger(__name__)


def key_type_of(algorithm: str) -> str:
    """The JWK key type that an algorithm needs."""
    return _KEY_TYPES[algorithm[:2]]


class KeyRing:
    """Keys by what they can verify. `generation` changes whenever a key may no longer be valid."""

    def __init__(self, algorithms: Sequence[str], keys: Iterable[Key], jwks: Jwks | None = None) -> None:
        self.algorithms = tuple(algorithms)
        self._own = tuple(keys)
        self._jwks = jwks

    @classmethod
    def from_settings(cls, settings: Settings) -> KeyRing:
        """Raises `SettingsError` when the settings admit no token at all: the server must not start like that."""
        return cls.of(
            settings.jwt_algorithm,
            settings.jwt_secret,
            settings.jwt_public_key,
            settings.jwt_jwks_url,
            settings.jwt_jwks_refresh_seconds,
        )

    @classmethod
    def of(cls, algorithm: str, secret: str, public_key: str, jwks_url: str, refresh_seconds: float = 300) -> KeyRing:
        keys: list[Key] = []
        if secret:
            keys.append(read_secret(secret))
        if public_key:
            keys.append(read_public_key(public_key))
        types = {key.key_type for key in keys}
        if jwks_url:
            types |= {"RSA", "EC", "OKP"}
        admitted = [name for name in ALGORITHMS[algorithm] if key_type_of(name) in types]
        if not admitted:
            raise SettingsError(_explain_no_key(algorithm, keys))
        wanted = {key_type_of(name) for name in admitted}
        for key in keys:
            if key.key_type not in wanted:
                variable = "JWT_SECRET" if key.key_type == "oct" else "JWT_PUBLIC_KEY"
                raise SettingsError(
                    f"{variable} is set, but JWT_ALGORITHM={algorithm} has no use for it: unset one of them"
                )
        return cls(admitted, keys, Jwks(jwks_url, refresh_seconds) if jwks_url else None)

    @property
    def generation(self) -> int:
        return self._jwks.generation if self._jwks is not None else 0

    @property
    def jwks(self) -> Jwks | None:
        return self._jwks

    @property
    def problem(self) -> str:
        """Why tokens of the identity provider cannot be verified; empty when they can."""
        return self._jwks.problem if self._jwks is not None else ""

    def candidates(self, algorithm: str, kid: str | None) -> list[Key]:
        """The keys that may have signed a token with this header, the configured ones first."""
        wanted = key_type_of(algorithm)
        found = [key for key in self._own if key.key_type == wanted]
        if self._jwks is not None:
            found += [key for key in self._jwks.find(kid) if key.key_type == wanted]
        return found

    async def refetch_for(self, algorithm: str, kid: str | None) -> bool:
        """Ask the provider for a key that is not known yet; whether it is worth trying the token again."""
        if self._jwks is None or algorithm not in self.algorithms or key_type_of(algorithm) == "oct":
            return False
        return await self._jwks.refetch_for(kid)

    def may_refetch(self, algorithm: str, kid: str | None) -> bool:
        return (
            self._jwks is not None
            and algorithm in self.algorithms
            and key_type_of(algorithm) != "oct"
            and self._jwks.may_refetch(kid)
        )

    def start(self) -> None:
        if self._jwks is not None:
            self._jwks.start()

    async def stop(self) -> None:
        if self._jwks is not None:
            await self._jwks.stop()


class Jwks:
    """The key set at one URL: fetched at the start, at intervals, and when a token names a key that is not known.

    A provider that is unreachable, or answers nonsense, changes nothing: the keys it last gave stay in force.
    """

    def __init__(
        self, url: str, refresh_seconds: float, fetch: Callable[[str], Any] | None = None, clock: Any = time.monotonic
    ) -> None:
        """`fetch` (an async function from the URL to a body) is for tests and for providers behind other clients."""
        self.url = url
        self.generation = 0
        self.problem = f"no keys have been fetched from JWT_JWKS_URL={url} yet"
        self._refresh_seconds = refresh_seconds
        self._fetch = fetch or fetch_text
        self._clock = clock
        self._keys: dict[str | None, list[Key]] = {}
        self._fetched_at: float | None = None
        self._fetching: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def find(self, kid: str | None) -> list[Key]:
        """The key named `kid`; for a token that names none, all of them."""
        if kid is None:
            return [key for keys in self._keys.values() for key in keys]
        return self._keys.get(kid) or self._keys.get(None, [])

    def may_refetch(self, kid: str | None) -> bool:
        if kid is not None and kid in self._keys:
            return False
        if kid is None and self._keys:
            return False
        if self._fetching is not None:
            # What it brings is waited for.
            return True
        return self._fetched_at is None or self._clock() - self._fetched_at >= _REFETCH_FLOOR_SECONDS

    async def refetch_for(self, kid: str | None) -> bool:
        if not self.may_refetch(kid):
            return False
        await self.refresh()
        return True

    async def refresh(self) -> None:
        """Fetch the keys; callers at the same time share one request."""
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._refresh())
            self._fetching.add_done_callback(self._fetch_ended)
        await asyncio.shield(self._fetching)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_fresh())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep_fresh(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(_RETRY_SECONDS if self.problem else self._refresh_seconds)

    def _fetch_ended(self, future: asyncio.Future[None]) -> None:
        self._fetching = None

    async def _refresh(self) -> None:
        self._fetched_at = self._clock()
        try:
            keys = read_jwks(await self._fetch(self.url))
        except (OSError, TimeoutError, ValueError, RecursionError) as error:
            self._failed(error)
            return
        before = {_thumbprint(key) for entries in self._keys.values() for key in entries}
        found = {_thumbprint(key) for entries in keys.values() for key in entries}
        self._keys = keys
        if before - found:
            self.generation += 1
        if self.problem or before != found:
            log.info("%d keys in force from JWT_JWKS_URL=%s", len(found), self.url)
        self.problem = ""

    def _failed(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        kept = sum(len(keys) for keys in self._keys.values())
        # With keys from before the server goes on as if nothing had happened; only without any do tokens fail.
        if not kept:
            self.problem = f"no keys could be fetched from JWT_JWKS_URL={self.url}: {reason}"
        log.warning("JWT_JWKS_URL=%s: %s; the %d keys fetched before stay in force", self.url, reason, kept)


def read_jwks(body: bytes | str) -> dict[str | None, list[Key]]:
    """The usable keys of a key set by their ids; raises ValueError when there is none."""
    try:
        entries = msgspec.json.decode(body, type=_KeySet).keys
    except msgspec.DecodeError as error:
        raise ValueError(f"not a JSON Web Key Set: {error}") from error
    keys: dict[str | None, list[Key]] = {}
    for entry in entries[:_MOST_JWKS_KEYS]:
        key = _read_jwk(entry)
        if key is not None:
            kid = entry.get("kid")
            keys.setdefault(kid if isinstance(kid, str) else None, []).append(key)
    if not keys:
        raise ValueError("it has no key that verifies RS256, ES256 or EdDSA")
    return keys


def read_public_key(text: str) -> Key:
    """The key in JWT_PUBLIC_KEY; raises `SettingsError` when it is none that can be used."""
    pem = text.replace("\\n", "\n").encode()
    if b"PRIVATE KEY" in pem:
        raise SettingsError("JWT_PUBLIC_KEY holds a private key: give the public key that belongs to it")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise SettingsError("JWT_PUBLIC_KEY: expected a public key in PEM (-----BEGIN PUBLIC KEY-----)") from None
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < 2048:
            raise SettingsError(f"JWT_PUBLIC_KEY: an RSA key of {key.key_size} bits is too weak; use 2048 or more")
        return RSAKey.import_key(pem)
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return ECKey.import_key(pem)
    if isinstance(key, ed25519.Ed25519PublicKey):
        return OKPKey.import_key(pem)
    raise SettingsError("JWT_PUBLIC_KEY: expected an RSA, P-256 or Ed25519 key")


async def fetch_text(url: str) -> bytes:
    """The body at a URL; raises OSError, TimeoutError or ValueError."""
    # An HTTP client is 10 MB of memory that few servers have a use for.
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_FETCH_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            if response.status != 200:
                raise ValueError(f"it was answered {response.status}")
            body = await response.content.read(_LARGEST_JWKS_BYTES + 1)
            while not response.content.at_eof() and len(body) <= _LARGEST_JWKS_BYTES:
                body += await response.content.read(_LARGEST_JWKS_BYTES + 1)
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from error
    if len(body) > _LARGEST_JWKS_BYTES:
        raise ValueError(f"it is larger than {_LARGEST_JWKS_BYTES} bytes")
    return body


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


def _read_jwk(entry: dict[str, Any]) -> Key | None:
    if entry.get("use") not in (None, "sig") or entry.get("kty") not in ("RSA", "EC", "OKP"):
        return None
    if entry.get("kty") == "EC" and entry.get("crv") != "P-256":
        return None
    if entry.get("kty") == "OKP" and entry.get("crv") != "Ed25519":
        return None
    # Only what makes the key: `alg` and `key_ops` of providers differ in spelling, and say nothing more.
    parts: dict[str, Any] = {name: entry[name] for name in ("kty", "n", "e", "crv", "x", "y") if name in entry}
    try:
        key = import_key(parts)
        key.get_op_key("verify")
    except (JoseError, ValueError, TypeError) as error:
        log.warning("the JSON Web Key %r cannot be used: %s", entry.get("kid"), error)
        return None
    if isinstance(key, RSAKey) and key.public_key.key_size < 2048:
        log.warning("the JSON Web Key %r is too weak: RSA with %d bits", entry.get("kid"), key.public_key.key_size)
        return None
    return key


def _thumbprint(key: Key) -> str:
    return key.thumbprint()


def read_secret(secret: str) -> OctKey:
    """The key of JWT_SECRET; a secret that can be guessed is refused or logged."""
    if "-----BEGIN" in secret:
        # If a public key were accepted as a secret, every client that knows it could sign with it.
        raise SettingsError("JWT_SECRET holds a PEM key: a public key belongs in JWT_PUBLIC_KEY")
    if not secret.strip():
        raise SettingsError("JWT_SECRET is blank: it can be guessed (openssl rand -hex 32 makes a good one)")
    if len(secret.encode()) < _SHORT_SECRET_BYTES:
        log.warning(
            "JWT_SECRET has %d bytes, fewer than the %d that HS256 needs to resist guessing: openssl rand -hex 32",
            len(secret.encode()),
            _SHORT_SECRET_BYTES,
        )
    return OctKey.import_key(secret.encode())


def _explain_no_key(algorithm: str, keys: Sequence[Key]) -> str:
    if keys:
        # `kty` names are what the documentation of providers uses.
        have = ", ".join(sorted({key.key_type for key in keys}))
        return f"JWT_ENABLED is true and JWT_ALGORITHM={algorithm}, but the only key that is set is of type {have}"
    needed = {"HS": "JWT_SECRET", "RS": "JWT_PUBLIC_KEY or JWT_JWKS_URL"}.get(
        algorithm[:2], "JWT_PUBLIC_KEY or JWT_JWKS_URL"
    )
    if algorithm == "auto":
        needed = "JWT_SECRET, JWT_PUBLIC_KEY or JWT_JWKS_URL"
    return f"JWT_ENABLED is true, but there is no key to verify tokens with: set {needed} (JWT_ALGORITHM={algorithm})"
