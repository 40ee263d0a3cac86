"""What `queen serve` does: the database first, then the workers, and all of it down again in reverse."""

import asyncio
import dataclasses
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from queen import __version__
from queen.cli.database import Migrate, SchemaMark, describe_dsn, prepare_database, prepare_shards
from queen.cli.port_check import check_port
from queen.cli.postgres_log import PostgresLog
from queen.cli.stop import Stop, first_of
from queen.cli.workers import RestartPolicy, WorkerPool
from queen.errors import QueenError
from queen.postgres import EmbeddedPostgres
from queen.settings import Settings

_log = logging.getLogger("queen.supervisor")

# A plain process, neither a fork nor a multiprocessing child: it inherits nothing of ours but a socket, needs
# no helper process beside it, and the process list says what it is. -P keeps the current directory out of its
# imports.
WORKER_COMMAND = (sys.executable, "-P", "-m", "queen.cli.worker")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POSTGRES_CHECK_SECONDS = 1.0
_POSTGRES_RETRY_SECONDS = 5.0
# Connections of the embedded PostgreSQL beyond those of the pools, for migrations, jobs and people.
_SPARE_CONNECTIONS = 40


class Supervisor:
    """Runs a server with these settings until SIGINT or SIGTERM; a second one makes it hurry."""

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

    async def run(self) -> None:
        check_port(self._settings.host, self._settings.port)
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._stop.ask)
        try:
            await self._serve()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    async def _serve(self) -> None:
        if not self._settings.embedded:
            await self._serve_from(self._settings, self._settings.database_dsns[0])
            return
        postgres = self._embedded_postgres()
        _log.info("starting the embedded PostgreSQL in %s", postgres.data_dir)
        try:
            await asyncio.to_thread(postgres.start)
            await self._serve_from(self._settings, postgres.dsn(), postgres)
        finally:
            await asyncio.to_thread(postgres.stop)

    def _embedded_postgres(self) -> EmbeddedPostgres:
        connections = self._settings.num_workers * self._settings.db_pool_size + _SPARE_CONNECTIONS
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
        await first_of(preparing, self._stop.asked.wait())
        with tempfile.TemporaryDirectory(prefix="queen-") as runtime_dir:
            # Workers are told the database, whoever runs it.
            told = dataclasses.replace(settings, database_urls=(dsn, *settings.database_dsns[1:]))
            pool = WorkerPool(told, Path(runtime_dir), self._worker_command, self._policy, self._stop)
            helpers = [asyncio.create_task(self._announce_when_ready(pool, dsn))]
            if postgres is not None:
                helpers.append(asyncio.create_task(self._keep_postgres(postgres)))
            try:
                await pool.run()
            finally:
                self._stop.asked.set()
                await asyncio.gather(*helpers)

    async def _announce_when_ready(self, pool: WorkerPool, dsn: str) -> None:
        await first_of(pool.all_ready.wait(), self._stop.asked.wait())
        if pool.all_ready.is_set() and not self._stop.asked.is_set():
            self._announce(_announcement(self._settings, dsn))

    async def _keep_postgres(self, postgres: EmbeddedPostgres) -> None:
        """Start the embedded PostgreSQL again should it die; workers connect anew by themselves."""
        written = PostgresLog(postgres.log_file)
        while not self._stop.asked.is_set():
            await self._stop.pause(_POSTGRES_CHECK_SECONDS)
            written.relay()
            if postgres.running or self._stop.asked.is_set():
                continue
            _log.error("the embedded PostgreSQL has died; starting it again")
            try:
                await asyncio.to_thread(postgres.start)
            except QueenError as error:
                _log.error("%s", error)
                await self._stop.pause(_POSTGRES_RETRY_SECONDS)


def _announcement(settings: Settings, dsn: str) -> str:
    host = "localhost" if settings.host in ("0.0.0.0", "::", "") else settings.host
    where = f"[{host}]" if ":" in host else host
    database = "PostgreSQL 18, embedded" if settings.embedded else f"PostgreSQL at {describe_dsn(dsn)}"
    if len(settings.database_dsns) > 1:
        database += f", and {len(settings.database_dsns) - 1} more (queen shards list)"
    return (
        f"Queen {__version__} is ready at http://{where}:{settings.port}\n"
        f"  workers   {settings.num_workers}\n"
        f"  database  {database}\n"
        f"  data      {settings.queen_data_dir}\n"
        f"  to stop   press Ctrl-C, or: kill {os.getpid()}"
    )
