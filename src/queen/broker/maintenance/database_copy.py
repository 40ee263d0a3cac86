"""Copying everything to another PostgreSQL with pg_dump and pg_restore, while pushes wait in the spool.

The worker that is asked runs both programs and passes the dump from one to the other, so that nothing of it is stored
in between, and both end when the worker does. Its progress is written to `system_state`, where the workers of all hosts
read it; an advisory lock shows that it still runs, because PostgreSQL releases the lock when the worker dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

import asyncpg
import msgspec

from queen.concurrency import BackgroundTasks
from queen.errors import BadRequest, Conflict, QueenError
from queen.postgres_tools import failure, find_tool, without_password
from queen.storage.database import UNAVAILABLE_ERRORS, AdvisoryLock, Connection, Database, unavailable_reason
from queen.storage.statements import load_statements

log = logging.getLogger(__name__)

EXCLUDABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "traces": ("traces", "trace_names"),
    "metrics": ("metric_lives", "metric_minutes", "metric_queue_minutes", "rollup_minutes"),
    "history": ("retention_history",),
    "dead_letters": ("dead_letters", "topic_dead_letters"),
    "audit": ("audit",),
}
"""Tables that can start empty, by group: nothing is delivered by them. Messages and positions belong together."""
# Servers write these also while pushes and pops rest: they are compared with what they held when they were copied.
_WRITTEN_AT_REST: Final = frozenset(
    {*EXCLUDABLE["metrics"], *EXCLUDABLE["audit"], "topic_nodes", "queen_proxy.sessions"}
)
_RUNNING: Final = ("dumping", "restoring")
SCHEMA: Final = "queen"
_SCHEMAS: Final = (f"--schema={SCHEMA}", "--schema=queen_proxy")
# Workers read the maintenance modes several times a second; one that was not notified of them stores pushes until then.
_MODES_SECONDS: Final = 2.0
_SAVE_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 10.0
_CHUNK: Final = 1 << 18
_MOST_OUTPUT: Final = 4000
_FAILED: tuple[type[BaseException], ...] = (asyncpg.PostgresError, *UNAVAILABLE_ERRORS)
_UNREACHABLE: tuple[type[BaseException], ...] = (ValueError, *_FAILED)
_TABLE: Final = re.compile(r'processing data for table "([^"]+)"')
_NAME: Final = re.compile(r"(?!-)[^\x00-\x1f\x7f]{1,255}")
_HOST: Final = re.compile(r"(?!-)[^\x00-\x20\x7f,]{1,255}")


@dataclass(frozen=True, slots=True)
class Target:
    """The database that everything is copied to."""

    host: str
    port: int
    database: str
    user: str
    password: str = field(repr=False)
    ssl: bool

    @staticmethod
    def of(host: str, port: str | int, database: str, user: str, password: str, ssl: bool) -> Target:
        """A target whose parts PostgreSQL's programs cannot take for options. Raises `BadRequest`."""
        number = int(port) if str(port).isascii() and str(port).isdecimal() and len(str(port)) < 6 else 0
        if not 1 <= number <= 65535:
            raise BadRequest("port must be a number from 1 to 65535")
        if not _HOST.fullmatch(host):
            raise BadRequest("host must be one name, address or directory; it must not begin with '-'")
        for what, name in (("database", database), ("user", user)):
            if not _NAME.fullmatch(name):
                raise BadRequest(f"{what} must have no control characters, and must not begin with '-'")
        if "\x00" in password:
            raise BadRequest("password must not contain a NUL character")
        return Target(host, number, database, user, password, ssl)

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}/{self.database}"

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """A connection; raises `TargetFailed` when it cannot be opened, or fails."""
        try:
            connection = await asyncpg.connect(
                host=self.host,
                port=self.port,
                database=self.database,
                user=self.user,
                password=self.password or None,
                ssl=self._sslmode,
                timeout=_CONNECT_SECONDS,
                server_settings={"application_name": "queen migration"},
            )
        except _UNREACHABLE as error:
            raise TargetFailed(unavailable_reason(error)) from error
        try:
            yield connection
        except _FAILED as error:
            raise TargetFailed(unavailable_reason(error)) from error
        finally:
            connection.terminate()

    async def version(self) -> str:
        """What the target says it is. Raises `TargetFailed`."""
        async with self.connect() as connection:
            return str(await connection.fetchval(load_statements()["copy_version"]))

    @property
    def environment(self) -> dict[str, str]:
        """Where to connect to, for PostgreSQL's programs: other users see the arguments of a process."""
        given = {
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGDATABASE": self.database,
            "PGUSER": self.user,
            "PGSSLMODE": self._sslmode,
        }
        return _environment(given | ({"PGPASSWORD": self.password} if self.password else {}))

    @property
    def _sslmode(self) -> Literal["require", "prefer"]:
        return "require" if self.ssl else "prefer"


class TargetFailed(QueenError):
    """The target cannot be reached, or refused a statement."""


class CopyFailed(QueenError):
    """A program of PostgreSQL has failed."""


class CopyState(msgspec.Struct, rename="camel"):
    """How far the last copy is, as it is stored."""

    status: str = "idle"
    step: str = ""
    elapsed: float = 0.0
    error: str = ""
    dump_output: str = ""
    restore_output: str = ""
    target: str = ""
    excluded: tuple[str, ...] = ()
    counts: dict[str, int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compared:
    """The rows of a table here and in the target."""

    table: str
    source: int
    target: int
    match: bool


class DatabaseCopy:
    """Copies the database of a server that has one shard; one copy at a time, whichever worker is asked."""

    def __init__(self, database: Database, dsn: str) -> None:
        self._database = database
        self.dsn = dsn
        self._tasks = BackgroundTasks()
        self._running: asyncio.Task[None] | None = None

    async def start(self, target: Target, exclude: Sequence[str] = ()) -> None:
        """Begin to copy; raises `Conflict` when that cannot be now, `BadRequest` when the target cannot be used."""
        groups = tuple(dict.fromkeys(exclude))
        for name in groups:
            if name not in EXCLUDABLE:
                raise BadRequest(
                    f"excludeTableData: {name[:80]!r} cannot be left behind; allowed: {', '.join(EXCLUDABLE)}"
                )
        session = await self._database.connect(
            application_name="queen migration", statement_timeout="0", idle_in_transaction_session_timeout="0"
        )
        try:
            if not await session.fetchval(self._sql("janitor_take"), AdvisoryLock.DATABASE_COPY):
                raise Conflict("Migration already in progress")
            modes = await session.fetchrow(self._sql("copy_modes"))
            if modes is None or not modes["resting"]:
                raise Conflict(
                    "push and pop maintenance must both be on, so that nothing is stored or consumed during the copy;"
                    " switch them on and start again"
                )
            version = await self._check(session, target)
            tools = [await asyncio.to_thread(find_tool, name, version) for name in ("pg_dump", "pg_restore")]
            state = CopyState("dumping", "starting", target=str(target), excluded=groups)
            await self.save(state)
        except TargetFailed as error:
            session.terminate()
            raise BadRequest(f"Connection to the target failed: {error}") from error
        except BaseException:
            session.terminate()
            raise
        copy = _Copy(self, session, target, state, *tools)
        self._running = self._tasks.spawn(copy.run(max(0.0, _MODES_SECONDS - modes["age"])))

    async def state(self) -> CopyState:
        """How far the last copy is; one whose worker has died has failed."""
        rows = await self._database.fetch("copy_state", AdvisoryLock.DATABASE_COPY)
        if not rows:
            return CopyState()
        state = msgspec.json.decode(rows[0]["state"], type=CopyState)
        if state.status not in _RUNNING:
            return state
        if rows[0]["running"]:
            state.elapsed += rows[0]["age"]
        else:
            state.status = "error"
            state.error = "the worker that ran the migration has ended before it was complete; start again"
        return state

    async def reset(self) -> None:
        """Forget the last copy. Raises `Conflict` while one runs."""
        if (await self.state()).status in _RUNNING:
            raise Conflict("Cannot reset while migration is in progress")
        await self.save(CopyState())

    async def compare(self, target: Target) -> list[Compared]:
        """The rows of every table, here and in the target. Raises `TargetFailed`."""
        state = await self.state()
        async with target.connect() as there:
            found = await self.counts(there)
        here = await self._database.connect(application_name="queen migration", statement_timeout="0")
        try:
            source = await self.counts(here)
        finally:
            here.terminate()
        left: set[str] = set()
        if state.status == "complete" and state.target == str(target):
            source |= {name: state.counts[name] for name in _WRITTEN_AT_REST & state.counts.keys()}
            left = {name for group in state.excluded for name in EXCLUDABLE[group]}
        return [
            Compared(
                name,
                source.get(name, 0),
                found.get(name, 0),
                name in found and found[name] == (0 if name in left else source.get(name, -1)),
            )
            for name in sorted(source.keys() | found.keys())
        ]

    async def counts(self, connection: Connection) -> dict[str, int]:
        """The rows of every table of a database, at one moment."""
        text = await connection.fetchval(self._sql("copy_count_text"))
        return {row["name"]: row["rows"] for row in await connection.fetch(text)} if text else {}

    async def stop(self) -> None:
        """End a copy that this worker runs; what it has copied is rolled back."""
        if self._running is not None:
            self._running.cancel()
        await self._tasks.finish()

    async def _check(self, session: Connection, target: Target) -> int:
        """Whether the target can be replaced; returns the version that the programs have to have at least."""
        async with target.connect() as there:
            own, other = [await one.fetchrow(self._sql("copy_identity")) for one in (session, there)]
            if own == other:
                raise BadRequest("the target is the database that this server runs on; name another one")
            others = await there.fetchval(self._sql("restore_connections"))
            if others:
                raise Conflict(
                    f"a server uses the target ({others} connections), and it would be replaced; stop it first"
                )
            return max(session.get_server_version().major, there.get_server_version().major)

    async def save(self, state: CopyState) -> None:
        """Write how far the copy is, for every worker to read."""
        await self._database.fetch("copy_save_state", msgspec.json.encode(state).decode())

    def _sql(self, name: str) -> str:
        return self._database.statements[name]


class _Copy:
    """One copy, from the snapshot to the last index."""

    def __init__(
        self, owner: DatabaseCopy, session: Connection, target: Target, state: CopyState, dump: Path, restore: Path
    ) -> None:
        """`session` holds the lock, and gives it back when it is closed."""
        self._owner = owner
        self._session = session
        self._target = target
        self._state = state
        self._dump_tool = dump
        self._restore_tool = restore
        self._began = time.monotonic()
        self._copied = 0

    async def run(self, wait: float) -> None:
        """Copy, after `wait` seconds, and write how that ended."""
        state, owner = self._state, self._owner
        log.info("migration to %s has begun", self._target)
        try:
            state.step = "waiting until every worker has read the maintenance modes"
            await asyncio.sleep(wait)
            await self._copy()
            state.status, state.step = "complete", f"copied {self._copied} bytes"
        except asyncio.CancelledError:
            state.status, state.error = "error", "the server was stopped; start again"
            raise
        except TargetFailed as error:
            state.status, state.error = "error", f"the target failed: {error}"
        except QueenError as error:
            state.status, state.error = "error", str(error)
        except _FAILED as error:
            state.status, state.error = "error", f"the source could not be read: {unavailable_reason(error)}"
        except Exception as error:
            log.exception("migration to %s failed", self._target)
            state.status, state.error = "error", f"internal error: {type(error).__name__}"
        finally:
            log.info("migration to %s: %s %s", self._target, state.status, state.error)
            state.elapsed = time.monotonic() - self._began
            try:
                await owner.save(state)
            except QueenError as error:
                # The lock is released below, by which the copy has failed for every reader.
                log.error("the end of the migration to %s could not be stored: %s", self._target, error)
            self._session.terminate()

    async def _copy(self) -> None:
        statements, session = load_statements(), self._session
        await session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        snapshot = await session.fetchval(statements["backup_snapshot"])
        self._state.counts = await self._owner.counts(session)
        async with self._target.connect() as there:
            await there.execute(statements["restore_drop"])
        await self._pipe(snapshot)
        async with self._target.connect() as there:
            # The state of this copy was copied, too: in the target it means nothing.
            await there.execute(statements["copy_save_state"], "{}")
            await there.execute(statements["restore_analyze"])

    async def _pipe(self, snapshot: str) -> None:
        """Run both programs, and pass the dump from one to the other."""
        url, environment = without_password(self._owner.dsn)
        left = [f"--exclude-table-data={SCHEMA}.{name}" for group in self._state.excluded for name in EXCLUDABLE[group]]
        with tempfile.TemporaryFile() as dump_output, tempfile.TemporaryFile() as restore_output:
            # Both end with this worker: one cannot write any more, the other does not get the end of the dump.
            dump = await asyncio.create_subprocess_exec(
                self._dump_tool,
                *("--format=custom", "--compress=0", "--verbose", "--no-password", "--no-owner", "--no-privileges"),
                *(*_SCHEMAS, *left, f"--snapshot={snapshot}", f"--dbname={url}"),
                env={**os.environ, **_CHILD, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=dump_output,
            )
            restore = None
            try:
                restore = await asyncio.create_subprocess_exec(
                    self._restore_tool,
                    *("--single-transaction", "--exit-on-error", "--verbose", "--no-password"),
                    # Everything about the target is in the environment.
                    *("--no-owner", "--no-privileges", "--dbname=postgresql://"),
                    env=self._target.environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=restore_output,
                )
                outputs = (dump_output, restore_output)
                reporting = asyncio.create_task(self._report(*outputs))
                try:
                    await self._pass_on(dump, restore, *outputs)
                finally:
                    reporting.cancel()
                    self._read(*outputs)
            finally:
                for process in (dump, restore):
                    if process is not None and process.returncode is None:
                        process.kill()
                        await process.wait()

    async def _pass_on(
        self, dump: Process, restore: Process, dump_output: IO[bytes], restore_output: IO[bytes]
    ) -> None:
        assert dump.stdout is not None
        assert restore.stdin is not None
        try:
            while chunk := await dump.stdout.read(_CHUNK):
                restore.stdin.write(chunk)
                await restore.stdin.drain()
                self._copied += len(chunk)
        except (BrokenPipeError, ConnectionResetError, RuntimeError):
            # uvloop's own error for a pipe that it knows to be closed is a RuntimeError.
            code = await restore.wait()
            raise CopyFailed(failure(self._restore_tool, code, _text(restore_output))) from None
        if code := await dump.wait():
            # The end of the input would be taken for the end of the dump.
            restore.kill()
            raise CopyFailed(failure(self._dump_tool, code, _text(dump_output)))
        self._state.status = "restoring"
        restore.stdin.close()
        if code := await restore.wait():
            raise CopyFailed(failure(self._restore_tool, code, _text(restore_output)))

    async def _report(self, dump_output: IO[bytes], restore_output: IO[bytes]) -> None:
        """Write how far the copy is, again and again."""
        while True:
            self._read(dump_output, restore_output)
            self._state.elapsed = time.monotonic() - self._began
            with contextlib.suppress(QueenError):
                await self._owner.save(self._state)
            await asyncio.sleep(_SAVE_SECONDS)

    def _read(self, dump_output: IO[bytes], restore_output: IO[bytes]) -> None:
        state, restored = self._state, _text(restore_output)
        state.dump_output, state.restore_output = _text(dump_output)[-_MOST_OUTPUT:], restored[-_MOST_OUTPUT:]
        tables = _TABLE.findall(restored)
        of = len(state.counts) - sum(len(EXCLUDABLE[group]) for group in state.excluded)
        if state.status == "restoring":
            state.step = "building indexes"
        elif tables:
            state.step = f"copying table {len(tables)} of {of}: {tables[-1]} ({self._copied} bytes)"


_CHILD: Final = {"PGAPPNAME": "queen migration", "LC_ALL": "C"}


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that connects to what is given, and to nothing that this process is set up for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, **_CHILD, **given}


def _text(output: IO[bytes]) -> str:
    """What a program has written so far; its position in the file is another than ours."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), size, 0).decode(errors="replace")
