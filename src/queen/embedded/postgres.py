"""The embedded PostgreSQL server: creates, starts, adopts and stops it."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from queen.embedded.account import Account, account_for, check_owner
from queen.embedded.configuration import (
    base_configuration,
    clean_environment,
    find_binaries,
    include_configuration,
    listening,
    write_configuration,
)
from queen.embedded.directories import DirectoryLock, choose_socket_dir, socket_path
from queen.embedded.errors import EmbeddedPostgresError, failure
from queen.embedded.postmaster import SUPERUSER, Postmaster, cluster_processes, find_postmaster, kill_processes
from queen.files import sync

_log = logging.getLogger(__name__)

_DEFAULT_PORT = 5432
_POLL_SECONDS = 0.02
# Crash recovery may take long, but the server reports it; one that does not respond at all is stuck.
_UNRESPONSIVE_SECONDS = 60.0
_RECOVERY_SECONDS = 1800.0
_FAST_SHUTDOWN_SECONDS = 60.0
_IMMEDIATE_SHUTDOWN_SECONDS = 10.0
_LOG_ROTATION_BYTES = 10 * 2**20
# A new cluster takes 40 MB, plus its first WAL segments.
_MIN_FREE_BYTES = 150 * 2**20


class EmbeddedPostgres:
    """PostgreSQL with its data, log and socket under `data_dir`, accessible only for this user and root.

    With a `port` it also listens on 127.0.0.1, with password authentication. `settings` are PostgreSQL's and override
    the defaults. `binaries` is the directory of another installation, of that `version`. All methods block; not
    thread-safe.
    """

    def __init__(
        self,
        data_dir: Path,
        version: int = 18,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        binaries: Path | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.version = version
        self._settings = dict(settings or {})
        self._binaries = binaries
        self._port = port
        self._cluster = self.data_dir / "cluster"
        self.log_file = self.data_dir / "postgres.log"
        self._lock = DirectoryLock(self.data_dir / "lock")
        self._postmaster: Postmaster | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._postmaster is not None and self._postmaster.alive()

    @property
    def pid(self) -> int:
        """The process id of the server, also after it has died."""
        return self._started().pid

    def dsn(self, database: str = "postgres") -> str:
        """A connection URL for `database`, as superuser over the private socket."""
        return self._started().dsn(database)

    def start(self) -> None:
        """Start the server: create the cluster if necessary, adopt a server that is still running."""
        if self.running:
            return
        binaries = self._binaries or find_binaries(self.version)
        account = account_for(self._cluster)
        try:
            self._prepare_directory(account)
            self._lock.acquire()
            binaries = account.reachable_programs(binaries, self.data_dir)
            self._bring_up(account, binaries)
        except OSError as error:
            self._lock.release()
            raise EmbeddedPostgresError(
                f"cannot use {error.filename or self.data_dir}: {error.strerror}; "
                "fix this, or choose another directory with --data-dir or QUEEN_DATA_DIR"
            ) from error
        except EmbeddedPostgresError:
            self._lock.release()
            raise

    def stop(self) -> None:
        """Shut the server down (fast shutdown) and wait until it has stopped."""
        if self._postmaster is not None:
            _shut_down(self._postmaster, self._cluster)
            if self._postmaster.socket_dir != self.data_dir:
                shutil.rmtree(self._postmaster.socket_dir, ignore_errors=True)
            self._postmaster = None
        self._lock.release()

    def kill(self) -> None:
        """Kill all processes of the server, like a crash."""
        server = self._started()
        processes = [process for process in cluster_processes(self._cluster) if process.pid != server.pid]
        server.signal(signal.SIGKILL)
        server.wait(_IMMEDIATE_SHUTDOWN_SECONDS)
        kill_processes(processes)

    def _started(self) -> Postmaster:
        if self._postmaster is None:
            raise EmbeddedPostgresError(f"the embedded PostgreSQL in {self.data_dir} has not been started")
        return self._postmaster

    def _prepare_directory(self, account: Account) -> None:
        if not self.data_dir.exists():
            self.data_dir.parent.mkdir(parents=True, exist_ok=True)
            account.check_reach(self.data_dir)
            self.data_dir.mkdir(mode=0o700)
        elif any(self.data_dir.iterdir()) and not (self.data_dir / "lock").exists():
            raise EmbeddedPostgresError(
                f"{self.data_dir} is not empty and not a PostgreSQL directory of Queen: choose another one"
            )
        account.chown(self.data_dir)
        check_owner(self.data_dir, account)
        account.check_reach(self.data_dir)

    def _bring_up(self, account: Account, binaries: Path) -> None:
        if not self._cluster.exists():
            self._create_cluster(account, binaries)
        check_owner(self._cluster, account)
        self._check_version()
        port = self._port or _DEFAULT_PORT
        socket_dir = choose_socket_dir(self.data_dir, port, account)
        where = listening(self._port, socket_dir, _DEFAULT_PORT)
        write_configuration(self._cluster, base_configuration(binaries) | where | self._settings)
        if not self._adopt(binaries):
            self._remove_stale_files(socket_dir, port)
            self._launch(account, binaries, socket_dir, port)

    def _create_cluster(self, account: Account, binaries: Path) -> None:
        free = shutil.disk_usage(self.data_dir).free
        if free < _MIN_FREE_BYTES:
            raise EmbeddedPostgresError(
                f"not enough disk space in {self.data_dir}: {free // 2**20} MB free, PostgreSQL needs "
                f"{_MIN_FREE_BYTES // 2**20} MB: free some space, or choose another directory"
            )
        _log.info("creating a PostgreSQL %d cluster in %s", self.version, self.data_dir)
        # Created under another name and renamed: a cluster with its final name is complete.
        fresh = self.data_dir / "cluster.new"
        shutil.rmtree(fresh, ignore_errors=True)
        locale = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if self.version >= 17 else []
        done = subprocess.run(
            [
                str(binaries / "initdb"),
                f"--pgdata={fresh}",
                f"--username={SUPERUSER}",
                "--encoding=UTF8",
                "--locale=C",
                *locale,
                "--data-checksums",
                "--auth-local=trust",
                "--auth-host=scram-sha-256",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.data_dir,
            env=clean_environment(),
            umask=0o077,
            start_new_session=True,
            **account.process_owner,
        )
        if done.returncode != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            raise failure("initdb failed", done.stdout, self.data_dir)
        include_configuration(fresh)
        fresh.rename(self._cluster)
        sync(self.data_dir)

    def _check_version(self) -> None:
        found = (self._cluster / "PG_VERSION").read_text().strip()
        if found != str(self.version):
            raise EmbeddedPostgresError(
                f"{self.data_dir} was created by PostgreSQL {found} and is not compatible with {self.version}: "
                "move the data with pg_dump and the previous version of Queen, or choose another directory"
            )

    def _adopt(self, binaries: Path) -> bool:
        """Adopt a server left running by a killed Queen, if there is one."""
        found = find_postmaster(self._cluster)
        if found is None:
            return False
        if not _becomes_ready(found, binaries):
            _log.warning("PostgreSQL left running (process %d) does not respond; stopping it", found.pid)
            _shut_down(found, self._cluster)
            return False
        self._postmaster = found
        found.signal(signal.SIGHUP)
        _log.info("adopted running PostgreSQL (process %d)", found.pid)
        return True

    def _remove_stale_files(self, socket_dir: Path, port: int) -> None:
        """Kill leftover processes and remove stale files of a dead server.

        PostgreSQL removes such files itself, but not if their process id has been reused. This process holds the
        lock of the directory, and no server runs in it.
        """
        kill_processes(list(cluster_processes(self._cluster)))
        unix_socket = socket_path(socket_dir, port)
        for stale in (self._cluster / "postmaster.pid", unix_socket, Path(f"{unix_socket}.lock")):
            stale.unlink(missing_ok=True)

    def _launch(self, account: Account, binaries: Path, socket_dir: Path, port: int) -> None:
        descriptor = self._open_log()
        written = os.lseek(descriptor, 0, os.SEEK_END)
        try:
            # Its own session: Ctrl-C in the terminal must not reach it before the workers have stopped.
            child = subprocess.Popen(
                [str(binaries / "postgres"), "-D", str(self._cluster)],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd=self.data_dir,
                env=clean_environment(),
                umask=0o077,
                start_new_session=True,
                **account.process_owner,
            )
        finally:
            os.close(descriptor)
        server = Postmaster(pid=child.pid, socket_dir=socket_dir, port=port, child=child)
        if not _becomes_ready(server, binaries):
            exited = not server.alive()
            if not exited:
                _shut_down(server, self._cluster)
            what = "PostgreSQL exited during startup" if exited else "PostgreSQL does not respond"
            raise failure(what, self._log_since(written), self.data_dir)
        self._postmaster = server

    def _open_log(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            if self.log_file.stat().st_size > _LOG_ROTATION_BYTES:
                self.log_file.replace(self.log_file.with_suffix(".log.1"))
        return os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)

    def _log_since(self, position: int) -> str:
        with self.log_file.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")


def _becomes_ready(server: Postmaster, binaries: Path) -> bool:
    """Wait until the server accepts connections; False if it exits or does not respond."""
    started = responded = logged = time.monotonic()
    while server.alive():
        status = _pg_isready(server, binaries)
        now = time.monotonic()
        if status == 0:
            return True
        if status == 1:
            responded = now
        if now - responded > _UNRESPONSIVE_SECONDS or now - started > _RECOVERY_SECONDS:
            return False
        if now - logged > 5:
            logged = now
            _log.info("waiting for PostgreSQL to start, %.0f s elapsed (crash recovery may take long)", now - started)
        time.sleep(_POLL_SECONDS)
    return False


def _pg_isready(server: Postmaster, binaries: Path) -> int:
    """0: the server accepts connections, 1: it is starting up or shutting down, 2: no response."""
    if not socket_path(server.socket_dir, server.port).exists():
        return 2
    return subprocess.run(
        [
            str(binaries / "pg_isready"),
            "--quiet",
            f"--host={server.socket_dir}",
            f"--port={server.port}",
            f"--username={SUPERUSER}",
        ],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
    ).returncode


def _shut_down(server: Postmaster, cluster: Path) -> None:
    server.signal(signal.SIGINT)
    if server.wait(_FAST_SHUTDOWN_SECONDS):
        return
    _log.warning(
        "PostgreSQL did not stop within %.0f s, shutting down immediately; the next start runs crash recovery",
        _FAST_SHUTDOWN_SECONDS,
    )
    server.signal(signal.SIGQUIT)
    if not server.wait(_IMMEDIATE_SHUTDOWN_SECONDS):
        server.signal(signal.SIGKILL)
        server.wait(_IMMEDIATE_SHUTDOWN_SECONDS)
        kill_processes(list(cluster_processes(cluster)))
