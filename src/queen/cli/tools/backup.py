"""`queen backup` and `queen restore`: everything a server stores, as it was at one moment.

A backup is a directory: a dump of each database in PostgreSQL's own format, the spool (what was accepted and is not yet
in PostgreSQL), and a manifest that says what belongs together. While the spool is copied and the snapshots of the
databases are taken, the replay of the spool is held back: every record is in the spool or in a dump, and the position
of the replay, which the dump has, says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from queen import __version__
from queen.cli.common.databases import (
    Databases,
    DatabaseUrl,
    DataDir,
    connected,
    open_databases,
    server_settings,
)
from queen.cli.common.exits import UserError
from queen.cli.common.output import Column, Output, Progress
from queen.cli.common.tree import command, group
from queen.postgres_tools import failure, find_tool, without_password

if TYPE_CHECKING:
    from queen.settings import Settings

backup_app = group("Write everything a server stores to a directory.")
restore_app = group("Restore a backup.")

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
_POLL_SECONDS: Final = 0.2
_COLUMNS = (
    Column("DATABASE", "database"),
    Column("QUEUES", "counts.queues", right=True),
    Column("MESSAGES", "counts.messages", right=True),
    Column("DEAD", "counts.deadLetters", right=True),
    Column("ITEMS", "counts.topicItems", right=True),
    Column("BYTES", "bytes", right=True),
)


class ShardBackup(msgspec.Struct, rename="camel"):
    """The dump of one database, and what it holds."""

    dump: str
    database: str
    bytes: int
    counts: dict[str, int]


class BackupManifest(msgspec.Struct, rename="camel"):
    """What a backup consists of."""

    format: int
    version: str
    schema_version: int
    created_at: str
    shards: list[ShardBackup]
    spool: list[str]


Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors.")]
OutputFormat = Annotated[str | None, typer.Option("-o", "--output", help="table, json, yaml …")]


@command(
    backup_app,
    "backup",
    example="""
queen backup /backups/queen-2026-11-16
queen backup /backups/today --database-url postgresql://queen:secret@db/queen
""",
)
def backup(
    directory: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    spool: Annotated[
        bool, typer.Option("--spool/--no-spool", help="Whether the spool of this host is part of it.")
    ] = True,
    output: OutputFormat = None,
    quiet: Quiet = False,
) -> None:
    """Write everything a server stores to a directory, while it runs or not.

    Run it on the host of the server, whose spool is part of the backup. What was answered before it
    began is in it. It needs pg_dump of the version of the server, or newer.
    """
    out = Output(output, quiet=quiet)
    if directory.exists():
        raise UserError(f"{directory} exists; name a directory that does not")
    partial = directory.with_name(directory.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    with open_databases(database_url, data_dir) as databases:
        partial.mkdir(parents=True, mode=0o700)
        try:
            manifest = asyncio.run(_back_up(databases, partial, out, spool))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    partial.rename(directory)
    out.rows(msgspec.to_builtins(manifest.shards), _COLUMNS, msgspec.to_builtins(manifest))
    out.note(f"backed up to {directory}: {len(manifest.shards)} databases, {len(manifest.spool)} files of the spool")


@command(
    restore_app,
    "restore",
    example="""
queen restore /backups/queen-2026-11-16 --data-dir /var/lib/queen
queen restore /backups/today --database-url postgresql://queen:secret@db/queen --force
""",
)
def restore(
    directory: Annotated[Path, typer.Argument(help="A directory that queen backup wrote.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing data.")] = False,
    output: OutputFormat = None,
    quiet: Quiet = False,
) -> None:
    """Restore a backup into empty databases; then start the server.

    The server has to be stopped. Offsets, positions of groups, leases, remembered transaction ids and
    the spool are those of the moment of the backup; what was counted is compared with the backup.
    """
    out = Output(output, quiet=quiet)
    manifest = read_manifest(directory)
    settings = server_settings(database_url, data_dir)
    _check_spool(settings, force)
    with _target(database_url, data_dir) as databases:
        if len(databases.dsns) != len(manifest.shards):
            raise UserError(
                f"the backup is of {len(manifest.shards)} databases, and {len(databases.dsns)} are configured;"
                " set DATABASE_URLS to as many"
            )
        asyncio.run(_restore(databases, directory, manifest, out, force))
    _restore_spool(settings, directory, force)
    out.rows(msgspec.to_builtins(manifest.shards), _COLUMNS, msgspec.to_builtins(manifest))
    out.note(f"restored {directory} of {manifest.created_at}; start the server: queen serve")


def read_manifest(directory: Path) -> BackupManifest:
    """The manifest of a backup that this version can restore."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=BackupManifest)
    except FileNotFoundError as error:
        raise UserError(f"{directory} is not a backup: it has no {MANIFEST}") from error
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{directory / MANIFEST} cannot be read: {error}") from error
    from queen.storage.migrate import load_migrations

    newest = max(migration.version for migration in load_migrations())
    if manifest.format != _FORMAT or manifest.schema_version > newest:
        raise UserError(f"the backup was made by Queen {manifest.version}, which is newer; install that version")
    for shard in manifest.shards:
        if not (directory / shard.dump).exists():
            raise UserError(f"the backup is not complete: {directory / shard.dump} is missing")
    return manifest


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A moment of one database, which pg_dump can look at as well."""

    dsn: str
    id: str
    schema_version: int
    counts: dict[str, int]


async def _back_up(databases: Databases, directory: Path, out: Output, with_spool: bool) -> BackupManifest:
    from queen.cli.serve.database import describe_dsn

    created_at = datetime.now(UTC)
    async with _snapshots(databases, directory if with_spool else None) as snapshots:
        shards = []
        for number, snapshot in enumerate(snapshots):
            name = f"shard-{number}.dump"
            with out.progress(f"dumping {describe_dsn(snapshot.dsn)}") as bar:
                await _dump(snapshot, directory / name, bar)
            size = (directory / name).stat().st_size
            shards.append(ShardBackup(name, describe_dsn(snapshot.dsn), size, snapshot.counts))
        manifest = BackupManifest(
            format=_FORMAT,
            version=__version__,
            schema_version=snapshots[0].schema_version,
            created_at=created_at.isoformat(),
            shards=shards,
            spool=sorted(
                str(path.relative_to(directory)) for path in (directory / "spool").rglob("*") if path.is_file()
            ),
        )
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    return manifest


@contextlib.asynccontextmanager
async def _snapshots(databases: Databases, directory: Path | None) -> AsyncIterator[list[_Snapshot]]:
    """Snapshots of all databases, and a copy of the spool that belongs to them."""
    import asyncpg

    from queen.storage.statements import load_statements

    sql = load_statements()
    async with AsyncExitStack() as stack:
        holders = []
        for dsn in databases.dsns:
            holder = await connected(dsn)
            stack.push_async_callback(holder.close)
            if not await holder.fetchval(sql["backup_is_queen"]):
                raise UserError(f"{_place(dsn)} has no Queen schema; there is nothing to back up")
            await holder.execute("BEGIN")
            await holder.execute(sql["backup_lock_timeout"])
            try:
                await holder.execute(sql["backup_hold_replay"])
            except asyncpg.LockNotAvailableError as error:
                raise UserError("the replay of the spool did not pause within 30 s; try again") from error
            holders.append(holder)
        if directory is not None:
            _copy_spool(databases.settings, directory / "spool")
        snapshots = []
        for dsn in databases.dsns:
            connection = await connected(dsn)
            stack.push_async_callback(connection.close)
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            name = await connection.fetchval(sql["backup_snapshot"])
            version = await connection.fetchval(sql["backup_schema_version"])
            snapshots.append(_Snapshot(dsn, name, version, await _counts(connection)))
        for holder in holders:
            await holder.execute("ROLLBACK")
        yield snapshots


async def _counts(connection: Any) -> dict[str, int]:
    from queen.storage.statements import load_statements

    return dict(await connection.fetchrow(load_statements()["backup_counts"]))


async def _dump(snapshot: _Snapshot, target: Path, bar: Progress) -> None:
    connection = await connected(snapshot.dsn)
    version = connection.get_server_version().major
    await connection.close()
    tool = find_tool("pg_dump", version)
    arguments = [
        "--format=custom",
        "--schema=queen",
        "--schema=queen_proxy",
        "--no-owner",
        "--no-privileges",
        f"--snapshot={snapshot.id}",
    ]
    await _run(tool, [*arguments, f"--file={target}"], snapshot.dsn, bar, target)


async def _restore(databases: Databases, directory: Path, manifest: BackupManifest, out: Output, force: bool) -> None:
    from queen.storage.statements import load_statements

    for dsn in databases.dsns:
        await _make_room(dsn, force)
    for dsn, shard in zip(databases.dsns, manifest.shards, strict=True):
        connection = await connected(dsn)
        version = connection.get_server_version().major
        await connection.close()
        tool = find_tool("pg_restore", version)
        with out.progress(f"restoring {shard.database}") as bar:
            arguments = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
            await _run(tool, [*arguments, str(directory / shard.dump)], dsn, bar, None)
        connection = await connected(dsn)
        try:
            found = await _counts(connection)
            await connection.execute(load_statements()["restore_privileges"])
            await connection.execute(load_statements()["restore_analyze"])
        finally:
            await connection.close()
        if found != shard.counts:
            different = {
                name: (shard.counts.get(name), found[name]) for name in found if found[name] != shard.counts.get(name)
            }
            raise UserError(f"{_place(dsn)} does not hold what was backed up: {different}; restore again with --force")


async def _make_room(dsn: str, force: bool) -> None:
    from queen.storage.statements import load_statements

    sql = load_statements()
    connection = await connected(dsn)
    try:
        others = await connection.fetchval(sql["restore_connections"])
        if others:
            raise UserError(f"a server uses {_place(dsn)} ({others} connections); stop it first")
        if await connection.fetchval(sql["restore_is_empty"]):
            return
        if not force:
            raise UserError(f"{_place(dsn)} has a Queen schema already; --force replaces it")
        await connection.execute(sql["restore_drop"])
    finally:
        await connection.close()


@contextlib.contextmanager
def _target(database_url: str | None, data_dir: Path | None) -> Any:
    """The databases to restore into; an embedded one is made if there is none, and must not be in use."""
    settings = server_settings(database_url, data_dir)
    if settings.database_dsns:
        yield Databases(settings.database_dsns, settings)
        return
    from queen.embedded import EmbeddedPostgres
    from queen.embedded.postmaster import find_postmaster

    place = settings.queen_data_dir / "postgres"
    if find_postmaster(place / "cluster") is not None:
        raise UserError(f"a server runs on {settings.queen_data_dir}; stop it first")
    settings.queen_data_dir.mkdir(parents=True, exist_ok=True)
    with EmbeddedPostgres(place) as server:
        yield Databases((server.dsn(),), settings)


def _spool_places(settings: Settings) -> dict[str, Path]:
    """The directories of the spool by the name they have in a backup."""
    places = {"pushes": settings.spool_dir}
    if not settings.wal_path.is_relative_to(settings.spool_dir):
        places["topics"] = settings.wal_path
    return places


def _copy_spool(settings: Settings, target: Path) -> None:
    for name, place in _spool_places(settings).items():
        while not _copy_records(place, target / name):
            pass


def _copy_records(place: Path, target: Path) -> bool:
    """Copy the files of a spool; False when one was renamed or removed meanwhile, so that it has to be done again."""
    if not place.exists():
        return True
    for path in sorted(place.rglob("*")):
        # Locks and the state that workers share are of running processes.
        if not path.is_file() or path.suffix == ".lock" or path.name == "board":
            continue
        copy = target / path.relative_to(place)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(path, copy)
        except FileNotFoundError:
            return False
        # The finished file replaces what was copied of it while it was still written.
        copy.with_name(copy.name + ".tmp").unlink(missing_ok=True)
    return True


def _check_spool(settings: Settings, force: bool) -> None:
    for place in _spool_places(settings).values():
        if (
            not force
            and place.exists()
            and any(path.is_file() and path.stat().st_size for path in place.rglob("*.buf*"))
        ):
            raise UserError(f"{place} holds records that are not in PostgreSQL yet; --force removes them")


def _restore_spool(settings: Settings, directory: Path, force: bool) -> None:
    for name, place in _spool_places(settings).items():
        if force and place.exists():
            shutil.rmtree(place)
        source = directory / "spool" / name
        if source.exists():
            shutil.copytree(source, place, dirs_exist_ok=True)


async def _run(tool: Path, arguments: Sequence[str], dsn: str, bar: Progress, grows: Path | None) -> None:
    """Run a program of PostgreSQL on a database; what it says becomes the error when it fails."""
    url, environment = without_password(dsn)
    process = await asyncio.create_subprocess_exec(
        str(tool), *arguments, f"--dbname={url}", stderr=subprocess.PIPE, env={**os.environ, **environment}
    )
    waiting = asyncio.create_task(process.communicate())
    began = time.monotonic()
    while not waiting.done():
        await asyncio.wait([waiting], timeout=_POLL_SECONDS)
        bar.update(completed=_size(grows) or int(time.monotonic() - began))
    _, output = await waiting
    if process.returncode:
        raise UserError(failure(tool, process.returncode, output.decode(errors="replace")))


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def _place(dsn: str) -> str:
    from queen.cli.serve.database import describe_dsn

    return describe_dsn(dsn)
