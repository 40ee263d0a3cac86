"""Users and their sessions in PostgreSQL, in the schema `queen_proxy`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

import asyncpg
import msgspec

from queen.errors import BadRequest, Conflict, NotFound
from queen.storage.statements import load_statements

ROLES: Final = ("admin", "read-write", "read-only")
_STATEMENT_SECONDS: Final = 5.0
"""A PostgreSQL that is cut off from here does not refuse anything, it is silent."""
_NAME: Final = re.compile(r"[\w.@+-]{1,255}")


@dataclass(frozen=True, slots=True)
class User:
    """A user who may log in."""

    id: int
    username: str
    role: str
    email: str | None
    password_hash: str | None
    disabled: bool
    locked_until: datetime | None

    @classmethod
    def from_record(cls, record: asyncpg.Record) -> User:
        return cls(
            record["id"],
            record["username"],
            record["role"],
            record["email"],
            record["password_hash"],
            record["disabled"],
            record["locked_until"],
        )

    @property
    def is_locked(self) -> bool:
        return self.locked_until is not None and self.locked_until > datetime.now(UTC)


class UserStore:
    """All statements about users and sessions."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool
        self._sql = load_statements()

    async def prepare(self) -> None:
        """Make the tables that are missing."""
        text = files("queen.storage").joinpath("migrations/0013_users.sql").read_text("utf-8")
        async with self._pool.acquire() as connection, connection.transaction():
            # Proxies that start together would trip over each other.
            await connection.execute(self._sql["lock_users_schema"])
            await connection.execute(text)

    async def ping(self) -> None:
        await self._rows("users_ping")

    async def by_name(self, username: str) -> User | None:
        return await self._one("user_by_name", username)

    async def by_google(self, subject: str) -> User | None:
        return await self._one("user_by_google", subject)

    async def by_identity(self, identity: str) -> User | None:
        return await self._one("user_by_identity", identity)

    async def by_email(self, email: str) -> User | None:
        return await self._one("user_by_email", email)

    async def named(self, username: str) -> User:
        user = await self.by_name(username)
        if user is None:
            raise NotFound(f"there is no user {username!r}")
        return user

    async def all(self) -> list[Mapping[str, Any]]:
        return [dict(record) for record in await self._rows("all_users")]

    async def create(
        self,
        username: str,
        password_hash: str | None,
        role: str,
        email: str | None = None,
        *,
        google: str | None = None,
        identity: str | None = None,
    ) -> User:
        check_username(username)
        check_role(role)
        provider = "google" if google else "oidc" if identity else "local"
        rows = await self._rows("create_user", username, password_hash, role, email, google, identity, provider)
        if not rows:
            other = f" or the email {email!r}" if email is not None else ""
            raise Conflict(f"there is a user with the name {username!r}{other} already")
        return User.from_record(rows[0])

    async def link_google(self, user: User, subject: str) -> bool:
        """False where the user is linked to another account already."""
        return bool(await self._rows("link_google", user.id, subject))

    async def link_identity(self, user: User, identity: str) -> bool:
        """The same; an identity at another issuer is replaced."""
        return bool(await self._rows("link_identity", user.id, identity))

    async def set_password(self, user: User, password_hash: str) -> None:
        await self._rows("set_password", user.id, password_hash)

    async def set_role(self, user: User, role: str) -> None:
        check_role(role)
        await self._rows("set_role", user.id, role)

    async def set_disabled(self, user: User, disabled: bool) -> None:
        await self._rows("set_disabled", user.id, disabled)

    async def delete(self, user: User) -> None:
        await self._rows("delete_user", user.id)

    async def login_failed(self, user: User) -> None:
        await self._rows("login_failed", user.id)

    async def login_succeeded(self, user: User) -> None:
        await self._rows("login_succeeded", user.id)

    async def begin_session(
        self, user: User, jti: str, expires_at: datetime | None, address: str, description: str
    ) -> None:
        await self._rows("begin_session", user.id, jti, expires_at, address, description[:200])

    async def live_session(self, jti: str) -> User | None:
        """The user of a session; None when it has ended."""
        return await self._one("live_session", jti)

    async def revoke_session(self, jti: str) -> None:
        await self._rows("revoke_session", jti)

    async def revoke_sessions(self, user: User) -> None:
        await self._rows("revoke_sessions", user.id)

    async def sessions_of(self, user: User) -> list[Mapping[str, Any]]:
        return [dict(record) for record in await self._rows("sessions_of", user.id)]

    async def forget_sessions(self) -> None:
        await self._rows("forget_sessions")

    async def audit(
        self,
        actor: str | None,
        address: str,
        action: str,
        subject: str,
        after: object = None,
        *,
        before: object = None,
    ) -> None:
        """Note what was done; `action` such as `login` or `user add`."""
        details = [msgspec.json.encode(one).decode() if one is not None else None for one in (before, after)]
        await self._rows("audit_write", actor, address, action, subject, None, *details)

    async def _one(self, statement: str, *args: object) -> User | None:
        rows = await self._rows(statement, *args)
        return User.from_record(rows[0]) if rows else None

    async def _rows(self, statement: str, *args: object) -> list[asyncpg.Record]:
        """Raises `TimeoutError` when PostgreSQL does not answer."""
        async with asyncio.timeout(_STATEMENT_SECONDS):
            connection = await self._pool.acquire()
            try:
                return await connection.fetch(self._sql[statement], *args)
            except asyncio.CancelledError:
                # asyncpg would ask PostgreSQL to cancel the statement, and wait for that without a limit.
                connection.terminate()
                raise
            finally:
                await self._pool.release(connection, timeout=_STATEMENT_SECONDS)


def is_username(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def as_username(email: str) -> str:
    """The name of a user with this address, which may have characters that names do not have."""
    return re.sub(r"[^\w.@+-]", "_", email)[:255]


def check_username(username: str) -> None:
    if not is_username(username):
        raise BadRequest("a user name has up to 255 letters, digits and . _ @ + -")


def check_role(role: str) -> None:
    if role not in ROLES:
        raise BadRequest(f"role must be one of {', '.join(ROLES)}, not {role!r}")
