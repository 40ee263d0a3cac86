"""Hashes of passwords: argon2id; bcrypt of earlier proxies is recognised."""

from __future__ import annotations

import asyncio
from typing import Final

import argon2
import bcrypt

from queen.errors import BadRequest

SHORTEST: Final = 8
_LONGEST: Final = 1024
_hasher = argon2.PasswordHasher()
# Verified for names that do not exist, so that they take as long as others; no password has this hash.
_DECOY: Final = (
    f"$argon2id$v=19$m={_hasher.memory_cost},t={_hasher.time_cost},p={_hasher.parallelism}${'A' * 22}${'A' * 43}"
)


class Passwords:
    """Hashes and verifies beside the event loop."""

    def __init__(self, at_a_time: int) -> None:
        # Each takes 64 MB and a core: more at a time would be a way to bring the machine down.
        self._room = asyncio.Semaphore(at_a_time)
        self.waiting = 0
        """How many are being verified or wait for it."""

    async def hash(self, password: str) -> str:
        """A new hash of a password that was accepted, however short those of earlier proxies may be."""
        async with self._room:
            return await asyncio.to_thread(_hasher.hash, password[:_LONGEST])

    async def verify(self, password: str, hashed: str | None) -> bool:
        self.waiting += 1
        try:
            async with self._room:
                return await asyncio.to_thread(_verify, password[:_LONGEST], hashed)
        finally:
            self.waiting -= 1


def is_outdated(hashed: str) -> bool:
    """Whether a password should be rehashed at the next login."""
    return not hashed.startswith("$argon2id$") or _hasher.check_needs_rehash(hashed)


def hash_password(password: str) -> str:
    check_password(password)
    return _hasher.hash(password)


def check_password(password: str) -> None:
    if not SHORTEST <= len(password) <= _LONGEST:
        raise BadRequest(f"a password has {SHORTEST} to {_LONGEST} characters")


def _verify(password: str, hashed: str | None) -> bool:
    try:
        if hashed is not None and hashed.startswith("$2"):
            # bcrypt uses 72 bytes; the program that made these hashes cut passwords there.
            return bcrypt.checkpw(password.encode()[:72], hashed.encode())
        return _hasher.verify(hashed or _DECOY, password) and hashed is not None
    except (argon2.exceptions.Argon2Error, argon2.exceptions.InvalidHashError, ValueError):
        return False
