"""`queen doctor`: checks of a deployment, with advice."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import shlex
import shutil
import socket
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import typer

from queen import __version__
from queen.cli.common.databases import DatabaseUrl, DataDir, connected, server_settings
from queen.cli.common.exits import SERVER, UserError, connection_failure
from queen.cli.common.output import Column, Output
from queen.cli.common.printable import on_one_line
from queen.cli.common.session import Session
from queen.cli.common.times import age
from queen.cli.common.tree import command, group

app = group("Check a deployment, and say what to do about what is wrong.")

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_STYLES: Final = {OK: "green", WARN: "yellow", FAIL: "red"}
_COLUMNS = (
    Column("STATUS", "status"),
    Column("CHECK", "check"),
    Column("FOUND", "found"),
    Column("REMEDY", "remedy"),
)
_SKEW_SECONDS: Final = 2.0
_LAG_SECONDS: Final = 300
_LEASE_SECONDS: Final = 600
_GROUPS: Final = 100
"""Number of groups that are behind whose leases are checked."""
_DEAD_TUPLES: Final = 10_000
_CERTIFICATE_DAYS: Final = 30
_DISK_SHARE: Final = 0.10
_XID_AGE: Final = 1_000_000_000
_TRANSACTION_SECONDS: Final = 300
_CONNECTION_SHARE: Final = 0.9
_LEAST_POSTGRES: Final = 15
_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?(\w+)", re.IGNORECASE)
_DROPPED = re.compile(r"DROP[ ]INDEX (?:CONCURRENTLY )?(?:IF EXISTS )?(?:queen\.)?(\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    status: str
    found: str
    remedy: str = ""

    @property
    def row(self) -> dict[str, str]:
        return {"check": self.check, "status": self.status, "found": self.found, "remedy": self.remedy}


@command(
    app,
    "doctor",
    example="""
queen doctor
queen doctor --server https://queen.example --database-url postgresql://queen@db/queen -o json
""",
)
def doctor(
    ctx: typer.Context,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    problems: Annotated[bool, typer.Option("--problems", help="Show only warnings and errors.")] = False,
) -> None:
    """Check a deployment, and say what to do about what is wrong.

    Through the server: whether it answers, its version, clock, spool, modes, groups, leases, dead
    letters and PostgreSQL. Where the settings of the server or --database-url name its database, also
    PostgreSQL's settings, schema and age; and the disks of this host. Exit code 2 when a check fails.
    """
    session = Session.of(ctx)
    findings = [
        *_server_checks(session),
        *_database_checks(database_url, data_dir),
        *_disk_checks(database_url, data_dir),
    ]
    shown = [finding for finding in findings if not problems or finding.status != OK]
    if session.out.given in (None, "table", "wide") and (session.out.given or session.out.terminal):
        _print(session.out, shown)
    else:
        session.out.rows([finding.row for finding in shown], _COLUMNS)
    failed = sum(finding.status == FAIL for finding in findings)
    warned = sum(finding.status == WARN for finding in findings)
    session.out.note(f"{len(findings)} checks: {failed} failed, {warned} warnings")
    if failed:
        raise typer.Exit(SERVER)


def _print(out: Output, findings: list[Finding]) -> None:
    for finding in findings:
        sign = out.styled(f"{finding.status:<4}", _STYLES[finding.status])
        out.text(f"{sign}  {finding.check:<18}  {on_one_line(finding.found)}")
        if finding.remedy:
            out.text(f"      {'':<18}  -> {on_one_line(finding.remedy)}")


def _server_checks(session: Session) -> Iterator[Finding]:
    from queen.client.errors import AuthError, QueenConnectionError, QueenError

    queen = session.connect(10_000, attempts=1)
    try:
        began = time.perf_counter()
        try:
            health = queen.admin.health()
        except QueenConnectionError as error:
            why, step = connection_failure(error)
            yield Finding("reachable", FAIL, f"{session.server.url}: {why}", step)
            yield from _certificate(session)
            return
        except QueenError:
            # It answers, and its readiness says what is wrong.
            health = {}
        millis = (time.perf_counter() - began) * 1000
        yield Finding("reachable", OK, f"{session.server.url} in {millis:.0f} ms")
        if health:
            yield _version(health)
        readiness = _readiness(session)
        yield _ready(readiness)
        # Without PostgreSQL all other checks would fail for the same reason.
        checks = (_clock, _spool, _modes, _groups, _leases, _dead_letters, _postgres) if readiness.get("ready") else ()
        for check in checks:
            name = check.__name__.strip("_").replace("_", " ")
            try:
                yield from check(queen)
            except AuthError as error:
                yield Finding(name, WARN, str(error), "log in: queen login")
            except QueenError as error:
                yield Finding(name, FAIL, str(error), "see the log of the server")
        yield from _certificate(session)
        yield from _open_to_all(session, readiness.get("warnings", []))
    finally:
        queen.close()


def _readiness(session: Session) -> dict[str, Any]:
    """What `/readyz` says, also while it says no."""
    try:
        with urlopen(f"{session.server.url}/readyz", timeout=10, context=session.tls_context()) as answer:
            body = answer.read()
    except HTTPError as error:
        body = error.read()
    except OSError as error:
        return {"ready": False, "reasons": [str(error)]}
    try:
        found: dict[str, Any] = json.loads(body)
    except ValueError:
        return {"ready": False, "reasons": ["/readyz is not answered by a Queen server"]}
    return found


def _version(health: Mapping[str, Any]) -> Finding:
    there = str(health.get("version"))
    if there == __version__:
        return Finding("version", OK, there)
    return Finding("version", WARN, f"server {there}, this command {__version__}", "install the same version on both")


def _ready(answer: Mapping[str, Any]) -> Finding:
    reasons = "; ".join(answer.get("reasons", []))
    if not answer.get("ready"):
        step = f"start PostgreSQL, or correct PG_HOST or DATABASE_URLS; pushes are {answer.get('pushes')} meanwhile"
        return Finding("ready", FAIL, reasons, step if "PostgreSQL" in reasons else "see the log of the server")
    if reasons:
        return Finding("ready", WARN, reasons, "see the log of the server")
    return Finding("ready", OK, f"pushes are {answer.get('pushes')}")


def _clock(queen: Any) -> Iterator[Finding]:
    before = datetime.now(UTC)
    # Views are cached for STATS_CACHE_MS with their times; that of a queue that was not requested before is not.
    view = queen.admin.get_parked_consumers(queue=f"doctor-{uuid.uuid4().hex}")
    server_time = datetime.fromisoformat(view["timeRange"]["to"])
    yield _skew("clock", "the server", server_time, before, datetime.now(UTC))


def _skew(check: str, whose: str, there: datetime, before: datetime, after: datetime) -> Finding:
    """How far a clock, which was read between two times of this host, is off."""
    skew = (there - before - (after - before) / 2).total_seconds()
    if abs(skew) > _SKEW_SECONDS + (after - before).total_seconds():
        return Finding(check, WARN, f"{whose} is {skew:+.1f} s off this host", "run NTP (chrony) on both hosts")
    return Finding(check, OK, f"{skew:+.2f} s from this host")


def _spool(queen: Any) -> Iterator[Finding]:
    stats = queen.admin.get_maintenance_mode()["bufferStats"]
    if stats["failedCount"]:
        step = "look into failed/ of FILE_BUFFER_DIR; its records are retried at the next start"
        yield Finding("spool", FAIL, f"{stats['failedCount']} records could not be replayed", step)
    elif stats["pendingCount"]:
        step = "PostgreSQL is down or slow, or maintenance is on; it drains by itself"
        yield Finding("spool", WARN, f"{stats['pendingCount']} records wait on disk", step)
    else:
        yield Finding("spool", OK, "empty")


def _modes(queen: Any) -> Iterator[Finding]:
    answer = queen.admin.get_maintenance_mode()
    on = [name for key, name in (("maintenanceMode", "push"), ("popMaintenanceMode", "pop")) if answer[key]]
    if on:
        steps = " and ".join("queen maintenance off" + (" --pop" if one == "pop" else "") for one in on)
        yield Finding("maintenance", WARN, f"{' and '.join(on)} maintenance is on", steps)
    else:
        yield Finding("maintenance", OK, "off")


def _groups(queen: Any) -> Iterator[Finding]:
    rows = queen.admin.list_consumer_groups() or []
    behind = [row for row in rows if (row["maxTimeLag"] or 0) > _LAG_SECONDS and row["totalLag"]]
    if not behind:
        yield Finding("lag", OK, f"{len(rows)} groups, none behind by more than {age(_LAG_SECONDS)}")
    for row in sorted(behind, key=lambda row: -row["maxTimeLag"])[:5]:
        found = f"{row['name']} on {row['queueName']}: {row['totalLag']} messages, {age(row['maxTimeLag'])}"
        names = shlex.join([row["name"], row["queueName"]])
        # Behind `--` a name may begin with a dash.
        moved = f"--to end -- {names}" if names.startswith("-") or " -" in names else f"{names} --to end"
        step = f"add consumers or partitions, or skip: queen group seek {moved}"
        yield Finding("lag", WARN, found, step)


def _leases(queen: Any) -> Iterator[Finding]:
    # A lease that has ended keeps its name until the next consumer comes.
    named = [row for row in queen.admin.get_lagging_consumers(_LEASE_SECONDS) or [] if row["worker_id"]]
    held: set[tuple[str, str, str]] = set()
    for name in list(dict.fromkeys(row["consumer_group"] for row in named))[:_GROUPS]:
        for queue, found in queen.admin.get_consumer_group(name).items():
            held |= {(name, queue, one["partition"]) for one in found["partitions"] if one["leaseActive"]}
    stuck = [row for row in named if (row["consumer_group"], row["queue_name"], row["partition_name"]) in held]
    if not stuck:
        yield Finding("leases", OK, "none is held by a consumer that is behind")
    for row in stuck[:5]:
        place = f"{row['queue_name']}/{row['partition_name']}"
        found = f"{row['consumer_group']} on {place} holds a lease, {age(row['time_lag_seconds'])} behind"
        yield Finding("leases", WARN, found, "a consumer hangs or dies: look at its log, shorten --lease-time")


def _dead_letters(queen: Any) -> Iterator[Finding]:
    total = queen.admin.list_dead_letters(limit=1)["total"]
    if total:
        yield Finding("dead letters", WARN, f"{total}", "queen dlq list shows why; queen dlq redrive QUEUE tries again")
    else:
        yield Finding("dead letters", OK, "none")


def _postgres(queen: Any) -> Iterator[Finding]:
    stats = queen.admin.get_postgres_stats()
    cache = stats.get("databaseCache") or {}
    reads, hits = cache.get("diskReads") or 0, cache.get("cacheHits") or 0
    ratio = 100 * hits / (reads + hits) if reads + hits else 100.0
    size = (stats.get("bufferConfig") or {}).get("sharedBuffersSize")
    if reads > 100_000 and ratio < 95:
        step = "raise shared_buffers to a quarter of the memory"
        yield Finding("cache", WARN, f"{ratio:.1f} % of reads are cached (shared_buffers {size})", step)
    else:
        yield Finding("cache", OK, f"{ratio:.1f} % of reads are cached")
    bloated = [
        row
        for row in stats.get("deadTuples") or []
        if row["deadTuples"] > _DEAD_TUPLES and (row["deadPercentage"] or 0) > 50
    ]
    if not bloated:
        yield Finding("dead tuples", OK, "no table has many")
    for row in bloated[:5]:
        found = f"{row['table']}: {row['deadTuples']} ({row['deadPercentage']:.0f} %)"
        step = f"autovacuum cannot keep up, or a long transaction holds it: VACUUM queen.{row['table']}"
        yield Finding("dead tuples", WARN, found, step)


def _certificate(session: Session) -> Iterator[Finding]:
    parts = urlsplit(session.server.url)
    if parts.scheme != "https":
        return
    address = (parts.hostname or "", parts.port or 443)
    try:
        distrust = _distrust(address)
        ends = _certificate_ends(address)
    except OSError as error:
        yield Finding("certificate", FAIL, str(error), "see the log of the server")
        return
    days = (ends - datetime.now(UTC)).total_seconds() / 86400
    if days < 0:
        yield Finding("certificate", FAIL, f"expired {-days:.0f} days ago", "renew it: TLS_CERT, TLS_KEY")
    elif distrust:
        step = "install a certificate that clients trust, or have them trust its issuer (SSL_CERT_FILE)"
        yield Finding("certificate", WARN if session.server.insecure else FAIL, distrust, step)
    elif days < _CERTIFICATE_DAYS:
        yield Finding("certificate", WARN, f"valid for {days:.0f} days", "renew it: TLS_CERT, TLS_KEY")
    else:
        yield Finding("certificate", OK, f"valid for {days:.0f} days")


def _distrust(address: tuple[str, int]) -> str:
    """Why this host does not trust the certificate of a server; empty when it does."""
    try:
        with (
            socket.create_connection(address, timeout=5) as plain,
            ssl.create_default_context().wrap_socket(plain, server_hostname=address[0]),
        ):
            return ""
    except ssl.SSLCertVerificationError as error:
        return f"not trusted: {error.verify_message}"


def _certificate_ends(address: tuple[str, int]) -> datetime:
    from cryptography import x509

    pem = ssl.get_server_certificate(address, timeout=5)
    return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc


def _open_to_all(session: Session, warnings: Sequence[str]) -> Iterator[Finding]:
    """Whether the server can be administered without a token, and from where it can be reached.

    `warnings` are what the server, which knows where it listens, says about that.
    """
    from queen.client.errors import AuthError, QueenError
    from queen.client.sync import QueenSync

    with QueenSync(
        session.server.url, retry_attempts=1, timeout_millis=5000, insecure=session.server.insecure
    ) as anonymous:
        try:
            anonymous.admin.get_maintenance_mode()
        except AuthError:
            yield Finding("access", OK, "a token is needed")
            return
        except QueenError as error:
            yield Finding("access", WARN, str(error), "see the log of the server")
            return
    host = urlsplit(session.server.url).hostname or ""
    step = "set JWT_ENABLED=true and a key, put the proxy in front, or listen on 127.0.0.1"
    place = _place(host)
    if place == "public":
        yield Finding("access", FAIL, f"{host} has a public address and can be administered without a token", step)
    elif place == "private":
        yield Finding("access", WARN, f"{host} can be administered without a token by its whole network", step)
    elif warnings:
        yield Finding("access", WARN, warnings[0], step)
    else:
        yield Finding("access", OK, "no token is needed, from this host")


def _place(host: str) -> str:
    """`local`, `private` or `public`: the most exposed of the addresses of a host."""
    try:
        found = {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):
        return "private"
    if any(address.is_global for address in found):
        return "public"
    return "local" if all(address.is_loopback for address in found) else "private"


def _database_checks(database_url: str | None, data_dir: Path | None) -> Iterator[Finding]:
    dsns = _configured(database_url, data_dir)
    for number, dsn in enumerate(dsns):
        label = "" if len(dsns) == 1 else f" {number}"
        try:
            yield from asyncio.run(_look_into(dsn, label))
        except UserError as error:
            yield Finding(f"postgresql{label}", FAIL, str(error), "start it, or correct the URL")


def _configured(database_url: str | None, data_dir: Path | None) -> tuple[str, ...]:
    """The databases that can be looked into from here; an embedded one only if it runs already."""
    settings = server_settings(database_url, data_dir)
    if settings.database_dsns:
        return settings.database_dsns
    try:
        from queen.embedded.postmaster import find_postmaster
    except ModuleNotFoundError:
        return ()
    running = find_postmaster(settings.queen_data_dir / "postgres" / "cluster")
    return () if running is None else (running.dsn("postgres"),)


_Judge = Callable[[str], bool]
_HARMFUL: Final[tuple[tuple[str, _Judge, str, str], ...]] = (
    ("fsync", lambda value: value == "off", FAIL, "fsync = on, or a crash loses and corrupts data"),
    ("full_page_writes", lambda value: value == "off", FAIL, "full_page_writes = on, or a crash can corrupt data"),
    (
        "data_checksums",
        lambda value: value == "off",
        WARN,
        "data_checksums = on (pg_checksums --enable while it is stopped), or damage on the disk goes unnoticed",
    ),
    ("autovacuum", lambda value: value == "off", FAIL, "autovacuum = on, or tables grow forever"),
    ("track_counts", lambda value: value == "off", FAIL, "track_counts = on, or autovacuum does nothing"),
    (
        "synchronous_commit",
        lambda value: value == "off",
        WARN,
        "synchronous_commit = on, or a crash of PostgreSQL loses pushes that were answered",
    ),
    ("shared_buffers", lambda value: int(value) * 8192 < 64 * 2**20, WARN, "shared_buffers = a quarter of the memory"),
    (
        "max_wal_size",
        lambda value: int(value) < 256,
        WARN,
        "max_wal_size = 1GB or more, or checkpoints slow pushes down",
    ),
)


async def _look_into(dsn: str, label: str) -> list[Finding]:
    from queen.storage.migrate import load_migrations
    from queen.storage.statements import load_statements

    sql = load_statements()
    connection = await connected(dsn)
    findings: list[Finding] = []
    try:
        findings.append(_postgres_version(connection.get_server_version(), label))
        findings.append(await _database_clock(connection, label))
        bad = False
        for name, harmful, status, remedy in _HARMFUL:
            value = await connection.fetchval(sql["doctor_setting"], name)
            if value is not None and harmful(value):
                bad = True
                findings.append(Finding(f"setting{label}", status, f"{name} = {value}", remedy))
        if not bad:
            findings.append(Finding(f"settings{label}", OK, "none that hurts"))
        migrations = load_migrations()
        findings.append(await _schema(connection, label, {migration.version for migration in migrations}))
        findings.append(await _indexes(connection, label, [migration.sql for migration in migrations]))
        findings += await _sessions(connection, label)
        xids = await connection.fetchval(sql["doctor_oldest_transaction"])
        status = OK if xids < _XID_AGE else WARN
        findings.append(
            Finding(
                f"transaction ids{label}", status, f"the oldest is {xids} old", "" if status == OK else "VACUUM FREEZE"
            )
        )
    finally:
        await connection.close()
    return findings


def _postgres_version(version: Any, label: str) -> Finding:
    found = f"version {version.major}.{version.minor}"
    if version.major < _LEAST_POSTGRES:
        return Finding(f"postgresql{label}", FAIL, found, f"upgrade PostgreSQL to {_LEAST_POSTGRES} or newer")
    return Finding(f"postgresql{label}", OK, found)


async def _database_clock(connection: Any, label: str) -> Finding:
    from queen.storage.statements import load_statements

    before = datetime.now(UTC)
    there = await connection.fetchval(load_statements()["doctor_clock"])
    return _skew(f"postgresql clock{label}", "PostgreSQL", there, before, datetime.now(UTC))


async def _schema(connection: Any, label: str, known: set[int]) -> Finding:
    from queen.storage.statements import load_statements

    sql = load_statements()
    if not await connection.fetchval(sql["doctor_has_schema"]):
        return Finding(f"schema{label}", FAIL, "there is none", "start a server on this database once: queen serve")
    applied = {row["version"] for row in await connection.fetch(sql["doctor_migrations"])}
    if known - applied:
        return Finding(
            f"schema{label}", WARN, f"{len(known - applied)} migrations are missing", "restart a server of this version"
        )
    if applied - known:
        return Finding(
            f"schema{label}", WARN, f"version {max(applied)} is newer than this command", "upgrade this command"
        )
    return Finding(f"schema{label}", OK, f"version {max(applied)}")


async def _indexes(connection: Any, label: str, migrations: list[str]) -> Finding:
    from queen.storage.statements import load_statements

    expected: set[str] = set()
    for sql in migrations:
        expected |= set(_INDEX.findall(sql))
        expected -= set(_DROPPED.findall(sql))
    rows = await connection.fetch(load_statements()["doctor_indexes"])
    valid = {row["relname"] for row in rows if row["indisvalid"]}
    broken = sorted(row["relname"] for row in rows if not row["indisvalid"])
    missing = sorted(expected - valid)
    if broken:
        return Finding(
            f"indexes{label}", FAIL, f"invalid: {', '.join(broken)}", f"REINDEX INDEX CONCURRENTLY queen.{broken[0]}"
        )
    if missing:
        step = "create them as src/queen/storage/migrations does"
        return Finding(f"indexes{label}", WARN, f"missing: {', '.join(missing)}", step)
    return Finding(f"indexes{label}", OK, f"all {len(expected)} are there")


async def _sessions(connection: Any, label: str) -> list[Finding]:
    from queen.storage.statements import load_statements

    sql = load_statements()
    rows = await connection.fetch(sql["doctor_transactions"], _TRANSACTION_SECONDS)
    findings = [
        Finding(
            f"transactions{label}",
            WARN,
            f"process {row['pid']} is in one for {age(row['seconds'])} ({row['state']}): {row['query']}",
            f"it keeps dead rows from being removed: end it, pg_terminate_backend({row['pid']})",
        )
        for row in rows
    ]
    used, most = await connection.fetchrow(sql["doctor_connections"])
    status = OK if used < _CONNECTION_SHARE * most else WARN
    step = "" if status == OK else "raise max_connections, or lower DB_POOL_SIZE"
    return [*findings, Finding(f"connections{label}", status, f"{used} of {most}", step)]


def _disk_checks(database_url: str | None, data_dir: Path | None) -> Iterator[Finding]:
    settings = server_settings(database_url, data_dir)
    places = {"data": settings.queen_data_dir, "spool": settings.spool_dir}
    for name, place in places.items():
        if not place.exists():
            continue
        usage = shutil.disk_usage(place)
        share = usage.free / usage.total
        found = f"{place}: {usage.free / 2**30:.1f} GB free ({100 * share:.0f} %)"
        status = OK if share > _DISK_SHARE else WARN
        yield Finding(f"disk ({name})", status, found, "" if status == OK else "free space, or move QUEEN_DATA_DIR")
