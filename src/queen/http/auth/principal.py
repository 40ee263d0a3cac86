"""The sender of a request and its permissions, read from the claims of a verified token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from queen.errors import SettingsError
from queen.http.server.message import Access
from queen.settings import Settings

_MOST_PATTERNS: Final = 1000
_MOST_PATTERN_LENGTH: Final = 1024
_LONGEST_SUBJECT: Final = 1024


ROLES: Final = {"admin": Access.ADMIN, "read-write": Access.READ_WRITE, "read-only": Access.READ_ONLY}


class ClaimError(ValueError):
    """A claim has a value of the wrong kind; the token is refused rather than read generously."""


class TokenRefused(Exception):
    """A token is not accepted. `text` is for the client, `reason` for counting."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


class KeyUnknown(TokenRefused):
    """No key that is known has this id; the identity provider may have a new one."""

    def __init__(self, algorithm: str, kid: str | None) -> None:
        super().__init__("key", "Token is signed with an unknown key")
        self.algorithm = algorithm
        self.kid = kid


class Patterns:
    """Names with `*` for any run of characters; `*` alone is any name."""

    __slots__ = ("_exact", "_globs", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._exact = frozenset(text for text in texts if "*" not in text)
        self._globs = tuple(text.split("*") for text in texts if "*" in text)

    def admits(self, name: str) -> bool:
        return name in self._exact or any(_matches(pieces, name) for pieces in self._globs)

    def __repr__(self) -> str:
        return f"Patterns({list(self.texts)!r})"


def _matches(pieces: Sequence[str], name: str) -> bool:
    # Found from left to right, each piece as early as it can be: no name takes long, whatever the pattern.
    first, *middle, last = pieces
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for piece in middle:
        found = name.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


Scopes = tuple[tuple[Patterns, frozenset[Access]], ...]


@dataclass(frozen=True, slots=True)
class Principal:
    """The bearer of a token. `queues`, `namespaces` and `groups` are None where the token says nothing of them.

    `scopes` are those of mqueue: what may be done, by patterns of namespaces. Where a token has them they alone decide
    about topics, unless its role is admin.
    """

    subject: str | None
    access: Access
    queues: Patterns | None = None
    namespaces: Patterns | None = None
    groups: Patterns | None = None
    scopes: Scopes | None = None
    expires: float = float("inf")
    """In seconds since 1970, skew included."""
    is_live: Callable[[], bool] | None = None
    """Whether its session has not ended; None: it belongs to no session, and ends when it expires."""

    @property
    def has_ended(self) -> bool:
        return time.time() >= self.expires or (self.is_live is not None and not self.is_live())

    @property
    def is_limited(self) -> bool:
        """Whether it is limited to some queues, namespaces or groups."""
        return self.queues is not None or self.namespaces is not None or self.groups is not None

    def may_use_topics(self, namespace: str, needed: Access) -> bool:
        """Whether a route of topics that needs this much may be called for a namespace."""
        if self.scopes is None or self.access is Access.ADMIN:
            return self.access >= needed
        return any(needed in granted and names.admits(namespace) for names, granted in self.scopes)


@dataclass(frozen=True, slots=True)
class ClaimNames:
    """Where in a token to find what, and what roles are called there."""

    role: str = "role"
    roles: str = "roles"
    admin: str = "admin"
    read_write: str = "read-write"
    read_only: str = "read-only"
    queues: str = "queues"
    namespaces: str = "namespaces"
    groups: str = "groups"

    @classmethod
    def from_settings(cls, settings: Settings) -> ClaimNames:
        """Raises `SettingsError` where two roles have the same name: the lesser would grant the greater."""
        roles = (settings.jwt_role_admin, settings.jwt_role_read_write, settings.jwt_role_read_only)
        if len(set(roles)) < len(roles):
            raise SettingsError(
                "JWT_ROLE_ADMIN, JWT_ROLE_READ_WRITE and JWT_ROLE_READ_ONLY have to differ: "
                f"they are {', '.join(map(repr, roles))}"
            )
        return cls(
            settings.jwt_roles_claim,
            settings.jwt_roles_array_claim,
            settings.jwt_role_admin,
            settings.jwt_role_read_write,
            settings.jwt_role_read_only,
            settings.jwt_queues_claim,
            settings.jwt_namespaces_claim,
            settings.jwt_groups_claim,
        )

    def principal(self, claims: Mapping[str, Any]) -> Principal:
        """Raises `ClaimError` for a claim that cannot be understood."""
        subject = claims.get("sub")
        if subject is not None and not (isinstance(subject, str) and is_subject(subject)):
            raise ClaimError(f"the claim sub is not text of up to {_LONGEST_SUBJECT} printable characters")
        return Principal(
            subject or None,
            self._access(claims),
            _patterns(claims, self.queues),
            _patterns(claims, self.namespaces),
            _patterns(claims, self.groups),
            _scopes(claims),
        )

    def _access(self, claims: Mapping[str, Any]) -> Access:
        names = set(_texts(claims.get(self.role))) | set(_texts(claims.get(self.roles)))
        if self.admin in names:
            return Access.ADMIN
        if self.read_write in names:
            return Access.READ_WRITE
        return Access.READ_ONLY if self.read_only in names else Access.PUBLIC


def is_subject(subject: str) -> bool:
    """Whether this is a valid subject."""
    # It is written next to every message, and into logs.
    return len(subject) <= _LONGEST_SUBJECT and subject.isprintable()


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return (each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def _patterns(claims: Mapping[str, Any], name: str) -> Patterns | None:
    value = claims.get(name)
    if value is None:
        return None
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ClaimError(f"the claim {name} is not a list of patterns")
    if len(entries) > _MOST_PATTERNS or any(len(entry) > _MOST_PATTERN_LENGTH for entry in entries):
        raise ClaimError(f"the claim {name} has more than {_MOST_PATTERNS} patterns, or one that is too long")
    return Patterns(entries)


# What is enough for a route that only reads is not what one needs that writes: `write` alone dequeues nothing.
_ACTIONS: Final = {
    "read": frozenset({Access.READ_ONLY}),
    "write": frozenset({Access.READ_WRITE}),
    "*": frozenset({Access.READ_ONLY, Access.READ_WRITE}),
}


def _scopes(claims: Mapping[str, Any]) -> Scopes | None:
    scopes, allowed = claims.get("scopes"), claims.get("allowed_namespaces")
    if scopes is None and allowed is None:
        return None
    granted = []
    for scope in _listed(scopes, "scopes"):
        namespace, _, action = scope.rpartition(":")
        # Scopes of other services may stand beside ours.
        if namespace and action in _ACTIONS:
            granted.append((Patterns([namespace]), _ACTIONS[action]))
    granted += [(Patterns([namespace]), _ACTIONS["*"]) for namespace in _listed(allowed, "allowed_namespaces")]
    return tuple(granted)


def _listed(value: object, name: str) -> list[str]:
    if value is None:
        return []
    entries = value.split() if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ClaimError(f"the claim {name} is not a list of texts")
    if len(entries) > _MOST_PATTERNS:
        raise ClaimError(f"the claim {name} has more than {_MOST_PATTERNS} entries")
    return entries


@dataclass(frozen=True, slots=True)
class Verified:
    """A token that was accepted, until when (in seconds since 1970, skew included), and under which keys."""

    principal: Principal
    claims: Mapping[str, Any]
    until: float
    generation: int
    by_secret: bool
    """Signed with `JWT_SECRET`."""


def is_session(verified: Verified) -> bool:
    """Whether a token belongs to a login session: such tokens can be revoked before they expire."""
    claims = verified.claims
    # Identity providers may have claims of these names, and sign with keys of their own.
    return verified.by_secret and isinstance(claims.get("id"), int) and isinstance(claims.get("username"), str)
