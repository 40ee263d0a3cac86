"""`queen user`: people who log in at the proxy, and their sessions."""

import asyncio
import getpass
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated

import asyncpg
import typer

from queen.cli.common.databases import open_databases
from queen.cli.common.output import FORMATS, Column, Output
from queen.cli.common.tree import command, group
from queen.errors import DatabaseUnavailable, QueenError
from queen.proxy.passwords import hash_password
from queen.proxy.settings import ProxySettings, parse_duration
from queen.proxy.users import ROLES, UserStore, check_role, check_username
from queen.storage.database import unavailable_reason
from queen.wire.times import iso_seconds

app = group("Users: people who log in, and their sessions.")
create_app = group("Add a user interactively.")

_SESSIONS = (
    Column("BEGUN", "begun"),
    Column("EXPIRES", "expires"),
    Column("FROM", "from"),
    Column("WHAT", "what"),
)
_COLUMNS = (
    Column("USER", "username"),
    Column("ROLE", "role"),
    Column("EMAIL", "email"),
    Column("PROVIDER", "provider"),
    Column("SESSIONS", "sessions", right=True),
    Column("STATE", "state"),
)

Username = Annotated[str, typer.Argument(help="The user.")]
Password = Annotated[
    str | None,
    typer.Option(help="The password. [prompt]", envvar="QUEEN_USER_PASSWORD", show_default=False),
]


@command(app, "add", example="queen user add alice --role admin\nqueen user add ci --no-password --token never")
def add(
    username: Annotated[str, typer.Argument(help="The name to log in with.")],
    role: Annotated[str, typer.Option(help="admin, read-write or read-only.")] = "read-only",
    email: Annotated[str | None, typer.Option(help="Lets the owner of this address sign in with a provider.")] = None,
    no_password: Annotated[bool, typer.Option(help="No password: only signing in with a provider.")] = False,
    token: Annotated[
        str | None, typer.Option(help="Print a bearer token as well, valid for 24h, 7d, 30d, 1y or never.")
    ] = None,
    password: Password = None,
) -> None:
    """Add a user."""
    check_username(username)
    check_role(role)
    if token is not None:
        parse_duration(token, "--token")
    settings = _settings(signing=token is not None)
    hashed = None if no_password else hash_password(password or _ask())
    _add(settings, username, hashed, role, email, token)


def _add(
    settings: ProxySettings, username: str, hashed: str | None, role: str, email: str | None, token: str | None
) -> None:
    async def work(users: UserStore) -> None:
        user = await users.create(username, hashed, role, email)
        await _note(users, "user add", username, after={"role": role, "email": email})
        print(f"added {username}, {role}")
        if token is not None:
            from queen.proxy.sessions import Sessions

            lifetime = parse_duration(token, "--token")
            print(await Sessions(settings, users).begin(user, "", f"queen user add --token {token}", lifetime))

    _run(settings, work)


@command(create_app, "create-user", example="queen create-user")
def create_user() -> None:
    """Add a user interactively: prompts for name, password and role, and offers a first token."""
    settings = _settings(signing=True)
    username = typer.prompt("User name").strip()
    check_username(username)
    hashed = hash_password(_ask())
    for number, name in enumerate(ROLES, 1):
        print(f"  {number}  {name}")
    number = typer.prompt("Role", default=len(ROLES), type=int)
    if not 1 <= number <= len(ROLES):
        raise QueenError(f"role must be a number from 1 to {len(ROLES)}, not {number}")
    role = ROLES[number - 1]
    choice = typer.prompt("Bearer token valid for (24h, 7d, 30d, 1y, never, skip)", default="skip").strip()
    if choice != "skip":
        parse_duration(choice, "token")
    _add(settings, username, hashed, role, None, None if choice == "skip" else choice)


@command(app, "list", example="queen user list\nqueen user list -o json")
def list_users(
    output: Annotated[str | None, typer.Option("-o", "--output", help=" | ".join(FORMATS))] = None,
) -> None:
    """Show all users."""
    out = Output(output)

    async def work(users: UserStore) -> None:
        rows = [
            {
                "username": one["username"],
                "role": one["role"],
                "email": one["email"],
                "provider": one["auth_provider"],
                "sessions": one["sessions"],
                "state": "disabled" if one["disabled"] else "locked" if one["locked_until"] else "active",
            }
            for one in await users.all()
        ]
        out.rows(rows, _COLUMNS)

    _run(_settings(), work)


@command(app, "role", example="queen user role alice read-only")
def set_role(username: Username, role: Annotated[str, typer.Argument(help="admin, read-write or read-only.")]) -> None:
    """Change the role of a user; open sessions get it within seconds."""

    async def work(users: UserStore) -> None:
        user = await users.named(username)
        await users.set_role(user, role)
        await _note(users, "user role", username, before={"role": user.role}, after={"role": role})
        print(f"{username}: {user.role} -> {role}")

    _run(_settings(), work)


@command(app, "password", example="queen user password alice")
def set_password(username: Username, password: Password = None) -> None:
    """Set a new password, unlock the user and end all its sessions."""
    hashed = hash_password(password or _ask())

    async def work(users: UserStore) -> None:
        user = await users.named(username)
        await users.set_password(user, hashed)
        await users.revoke_sessions(user)
        await _note(users, "user password", username)
        print(f"{username} has a new password; all sessions are ended")

    _run(_settings(), work)


@command(app, "disable", example="queen user disable alice")
def disable(
    username: Username, enable: Annotated[bool, typer.Option("--enable", help="Enable the user again.")] = False
) -> None:
    """Disable a user and end all its sessions."""

    async def work(users: UserStore) -> None:
        user = await users.named(username)
        await users.set_disabled(user, not enable)
        if not enable:
            await users.revoke_sessions(user)
        action = "user enable" if enable else "user disable"
        await _note(users, action, username, before={"disabled": user.disabled}, after={"disabled": not enable})
        print(f"{username} is {'enabled' if enable else 'disabled'}")

    _run(_settings(), work)


@command(app, "delete", example="queen user delete alice")
def delete(username: Username) -> None:
    """Delete a user with its sessions."""

    async def work(users: UserStore) -> None:
        user = await users.named(username)
        await users.delete(user)
        await _note(users, "user delete", username, before={"role": user.role, "email": user.email})
        print(f"deleted {username}")

    _run(_settings(), work)


@command(app, "sessions", example="queen user sessions alice\nqueen user sessions alice --revoke")
def sessions(
    username: Username,
    revoke: Annotated[bool, typer.Option(help="End all of them.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", help=" | ".join(FORMATS))] = None,
) -> None:
    """Show the sessions and tokens of a user, or end them."""
    out = Output(output)

    async def work(users: UserStore) -> None:
        user = await users.named(username)
        if revoke:
            await users.revoke_sessions(user)
            await _note(users, "user revoke", username)
            print(f"all sessions of {username} are ended")
            return
        rows = [
            {
                "begun": iso_seconds(one["created_at"]),
                "expires": iso_seconds(one["expires_at"]) if one["expires_at"] else "never",
                "from": one["address"],
                "what": one["description"],
            }
            for one in await users.sessions_of(user)
        ]
        out.rows(rows, _SESSIONS)

    _run(_settings(), work)


def _ask() -> str:
    if not sys.stdin.isatty():
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            raise QueenError("there is no password: write it to stdin, or pass --password")
        return line
    first = getpass.getpass("Password: ")
    if first != getpass.getpass("Again: "):
        raise QueenError("the passwords differ")
    return first


async def _note(users: UserStore, action: str, username: str, *, before: object = None, after: object = None) -> None:
    """Write into the audit log what was done here, on which machine, and by which of its users."""
    actor = f"cli:{os.environ.get('USER') or os.geteuid()}"
    await users.audit(actor, socket.gethostname(), action, username, after, before=before)


def _settings(*, signing: bool = False) -> ProxySettings:
    """Only a token needs the secret, which `signing` asks for; everything else uses the database."""
    environ = dict(os.environ)
    if not signing and not environ.keys() & {"JWT_SECRET", "JWT_SECRET_FILE"}:
        environ["JWT_SECRET"] = "unused"
    return ProxySettings.from_env(environ)


def _run(settings: ProxySettings, work: Callable[[UserStore], Awaitable[None]]) -> None:
    async def run(dsn: str) -> None:
        try:
            pool = await asyncpg.create_pool(dsn, min_size=1, max_size=1, timeout=10)
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            raise DatabaseUnavailable(f"cannot connect to PostgreSQL: {unavailable_reason(error)}") from error
        async with pool:
            users = UserStore(pool)
            await users.prepare()
            await work(users)

    if settings.database_url:
        asyncio.run(run(settings.database_url))
        return
    with open_databases(None, None) as databases:
        asyncio.run(run(databases.dsns[0]))
