"""`queen serve`: starts the database and the workers, supervises them, and stops them in reverse order."""

import asyncio
import dataclasses
import errno
import logging
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from queen import __version__
from queen.cli.serve.database import Migrate, SchemaMark, describe_dsn, prepare_database, prepare_shards
from queen.cli.serve.privileges import WorkerUser, listening_sockets, prepare_user
from queen.cli.serve.workers import RestartPolicy, Stop, WorkerPool, first_of
from queen.embedded import EmbeddedPostgres
from queen.errors import QueenError
from queen.settings import Settings


def check_port(host: str, port: int) -> None:
    """Raise a QueenError with the reason if `host` and `port` cannot be listened on."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise QueenError(f"HOST={host} is not a valid address: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # Without SO_REUSEPORT, which workers use: with it, two servers could share a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise QueenError(_explain(error, host, port)) from None


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is already in use; choose another with --port or PORT"
    if error.errno == errno.EACCES:
        return f"port {port} requires privileges; choose one above 1023 with --port or PORT"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; choose another with --host or HOST"
    return f"cannot listen on {host}, port {port}: {error.strerror}"


_log = logging.getLogger("queen.postgres.server")

# Errors of statements are not relayed: the client receives them, and their text may contain payloads.
_LEVELS = {
    "PANIC": logging.ERROR,
    "FATAL": logging.WARNING,
    "WARNING": logging.WARNING,
    "LOG": logging.DEBUG,
}
_LINE = re.compile(r"\S+ \S+ \S+ \[\d+\] ([A-Z]+):  (.*)")
_MAX_BYTES = 256 * 1024


class PostgresLog:
    """Relays new lines of PostgreSQL's log file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._size()
        self._partial = b""

    def relay(self) -> None:
        """Log the new lines; only the last ones if there are very many."""
        size = self._size()
        if size < self._position:
            # The file was rotated at a restart.
            self._position, self._partial = 0, b""
        if size == self._position:
            return
        if size - self._position > _MAX_BYTES:
            self._position, self._partial = size - _MAX_BYTES, b""
        with self._path.open("rb") as file:
            file.seek(self._position)
            added = file.read(size - self._position)
        self._position += len(added)
        *lines, self._partial = (self._partial + added).split(b"\n")
        for line in lines:
            _relay(line.decode(errors="replace"))

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def _relay(line: str) -> None:
    found = _LINE.fullmatch(line)
    if found is not None and found[1] in _LEVELS:
        _log.log(_LEVELS[found[1]], "PostgreSQL: %s", found[2])


_supervisor_log = logging.getLogger("queen.supervisor")

# The launcher of workers, a plain process: it inherits only a socket. -P keeps the current directory out of sys.path.
WORKER_COMMAND = (sys.executable, "-P", "-m", "queen.cli.serve.worker")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POSTGRES_CHECK_SECONDS = 1.0
_POSTGRES_RETRY_SECONDS = 5.0
# Connections of a worker besides its pool: one or two for each kind of batch, the heartbeat, background jobs.
_BATCH_CONNECTIONS = 25
# For migrations, the command line and administrators.
_SPARE_CONNECTIONS = 40


class Supervisor:
    """Runs a server until SIGINT or SIGTERM; a second signal kills workers that are still running."""

    def __init__(
        self,
        settings: Settings,
        migrate: Migrate,
        announce: Callable[[str], None],
        worker_command: Sequence[str] = WORKER_COMMAND,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._migrate = migrate
        self._announce = announce
        self._worker_command = worker_command
        self._policy = (policy or RestartPolicy()).lengthened(settings.shutdown_delay_ms / 1000)
        self._stop = Stop()
        self._pool: WorkerPool | None = None
        self._user = WorkerUser()

    async def run(self) -> None:
        check_port(self._settings.listen_host, self._settings.port)
        self._user = prepare_user(self._settings, self._worker_command)
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop.request)
        if self._settings.tls_cert:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            await self._serve()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _reload(self) -> None:
        """With TLS, SIGHUP is for the certificate: workers load it again."""
        if self._pool is not None:
            self._pool.signal(signal.SIGHUP)

    async def _serve(self) -> None:
        if not self._settings.embedded:
            await self._serve_from(self._settings, self._settings.database_dsns[0])
            return
        postgres = self._embedded_postgres()
        _supervisor_log.info("starting embedded PostgreSQL in %s", postgres.data_dir)
        try:
            await asyncio.to_thread(postgres.start)
            await self._serve_from(self._settings, postgres.dsn(), postgres)
        finally:
            await asyncio.to_thread(postgres.stop)

    def _embedded_postgres(self) -> EmbeddedPostgres:
        per_worker = self._settings.db_pool_size + _BATCH_CONNECTIONS
        connections = self._settings.num_workers * per_worker + _SPARE_CONNECTIONS
        return EmbeddedPostgres(
            self._settings.queen_data_dir / "postgres",
            settings={"max_connections": str(max(200, connections))},
        )

    async def _serve_from(self, settings: Settings, dsn: str, postgres: EmbeddedPostgres | None = None) -> None:
        mark = SchemaMark(settings.queen_data_dir, dsn) if postgres is None else None
        if len(settings.database_dsns) > 1:
            preparing = prepare_shards(settings.database_dsns, self._migrate)
        else:
            preparing = prepare_database(dsn, self._migrate, mark=mark)
        await first_of(preparing, self._stop.requested.wait())
        with tempfile.TemporaryDirectory(prefix="queen-") as runtime_dir:
            # Workers get the URL of the embedded PostgreSQL, too.
            resolved = dataclasses.replace(settings, database_urls=(dsn, *settings.database_dsns[1:]))
            self._user.own(Path(runtime_dir))
            pool = self._pool = WorkerPool(
                resolved,
                Path(runtime_dir),
                self._worker_command,
                self._policy,
                self._stop,
                self._user,
                listening_sockets(settings) if self._user.account is not None else (),
            )
            tasks = [asyncio.create_task(self._announce_when_ready(pool, dsn))]
            if postgres is not None:
                tasks.append(asyncio.create_task(self._supervise_postgres(postgres)))
            try:
                await pool.run()
            finally:
                self._stop.requested.set()
                await asyncio.gather(*tasks)

    async def _announce_when_ready(self, pool: WorkerPool, dsn: str) -> None:
        await first_of(pool.all_ready.wait(), self._stop.requested.wait())
        if pool.all_ready.is_set() and not self._stop.requested.is_set():
            self._announce(_announcement(self._settings, dsn))

    async def _supervise_postgres(self, postgres: EmbeddedPostgres) -> None:
        """Restart the embedded PostgreSQL when it dies, and relay its log; workers reconnect by themselves."""
        postgres_log = PostgresLog(postgres.log_file)
        while not self._stop.requested.is_set():
            await self._stop.sleep(_POSTGRES_CHECK_SECONDS)
            postgres_log.relay()
            if postgres.running or self._stop.requested.is_set():
                continue
            _supervisor_log.error("embedded PostgreSQL died; restarting it")
            try:
                await asyncio.to_thread(postgres.start)
            except QueenError as error:
                _supervisor_log.error("%s", error)
                await self._stop.sleep(_POSTGRES_RETRY_SECONDS)


def _announcement(settings: Settings, dsn: str) -> str:
    host = "localhost" if settings.listen_host in ("0.0.0.0", "::") else settings.listen_host
    where = f"[{host}]" if ":" in host else host
    database = "PostgreSQL 18, embedded" if settings.embedded else f"PostgreSQL at {describe_dsn(dsn)}"
    if len(settings.database_dsns) > 1:
        database += f", and {len(settings.database_dsns) - 1} more (queen shards list)"
    reach = ""
    if not settings.host and not settings.is_guarded:
        reach = "  reach     this machine only; JWT_ENABLED=true or HOST=0.0.0.0 opens it (docs/security.md)\n"
    return (
        f"Queen {__version__} is ready at {'https' if settings.tls_cert else 'http'}://{where}:{settings.port}\n"
        f"{reach}"
        f"  workers   {settings.num_workers}\n"
        f"  database  {database}\n"
        f"  data      {settings.queen_data_dir}\n"
        f"  to stop   press Ctrl-C, or: kill {os.getpid()}"
    )
