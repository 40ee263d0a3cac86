"""The user that workers run as when root starts the server: the one that PostgreSQL runs as, too."""

import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import queen
from queen.embedded.account import Account, account_for
from queen.embedded.errors import EmbeddedPostgresError
from queen.errors import QueenError
from queen.settings import Settings

_log = logging.getLogger("queen.supervisor")

_FIRST_UNPRIVILEGED_PORT = 1024
# What the supervisor and the workers create is for their user alone, whatever the umask was.
_UMASK = 0o077
_OWN_NAMES = frozenset({"postgres", "spool", "pipelines", "migrated.json", "topics", "lost+found"})
# A directory that holds one of these was used by Queen before, whatever else is in it.
_OWN_MARKS = ("postgres/cluster", "migrated.json", "users.lock", "spool/users.lock", "shard-0/users.lock")


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerUser:
    """The user that workers run as; without an account, the one that started the server."""

    account: Account | None = None
    home: Path | None = None

    def process(self) -> dict[str, Any]:
        """The arguments of `subprocess.Popen` that make a process one of this user."""
        return dict(self.account.process_owner) if self.account is not None else {}

    def environment(self) -> dict[str, str]:
        """What a process of this user has in its environment instead of root's."""
        if self.account is None:
            return {}
        # Drivers look for certificates and passwords at home.
        return {"HOME": str(self.home), "USER": self.account.name, "LOGNAME": self.account.name}

    def own(self, directory: Path) -> None:
        """Give a directory, and what root has in it, to this user."""
        if self.account is not None:
            self.account.own(directory)


def prepare_user(settings: Settings, command: Sequence[str]) -> WorkerUser:
    """The user that workers run a `command` as, with all files they need readable. Raises `QueenError` with advice."""
    os.umask(_UMASK)
    _prepare_directory(settings.queen_data_dir, "QUEEN_DATA_DIR")
    account = _account(settings)
    if account is None:
        return WorkerUser()
    # PostgreSQL's data are in it, whatever user the workers run as.
    account.check_reach(settings.queen_data_dir)
    account.own(settings.queen_data_dir)
    if not _can_run(account, command):
        return WorkerUser()
    for setting in ("tls_cert", "tls_key", "tls_client_ca", "peer_ca"):
        path = getattr(settings, setting)
        if path and Path(path).exists() and not account.can_read(Path(path)):
            raise QueenError(
                f"{setting.upper()}={path}: the workers run as the user {account.name}, who may not read it: "
                f"chown {account.name} {path}, or start Queen as an unprivileged user"
            )
    for directory, variable in ((settings.spool_dir, "FILE_BUFFER_DIR"), (settings.wal_path, "WAL_DIR")):
        _prepare_directory(directory, variable)
        account.check_reach(directory)
        account.own(directory)
    _log.info("workers run as the user %s", account.name)
    return WorkerUser(account, settings.queen_data_dir)


def _prepare_directory(directory: Path, variable: str) -> None:
    """Make a directory, and private; raises `QueenError` where root would give away what others keep in it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found, me = directory.stat(), os.geteuid()
    if me not in (0, found.st_uid):
        return
    names = {entry.name for entry in directory.iterdir()}
    # What the server prints is often kept beside its data.
    strange = sorted(name for name in names - _OWN_NAMES if not name.endswith("log"))
    if not strange or any((directory / mark).exists() for mark in _OWN_MARKS):
        directory.chmod(0o700)
    elif me == 0:
        raise QueenError(
            f"{variable}={directory}: there are other files than Queen's in it ({', '.join(strange[:3])}), and all of "
            "it would be given to another user: choose a directory of its own, or start Queen as an unprivileged user"
        )


def listening_sockets(settings: Settings) -> list[socket.socket]:
    """One for each worker where only root may open them, else none: then workers listen by themselves."""
    if settings.port >= _FIRST_UNPRIVILEGED_PORT or os.geteuid() != 0:
        return []
    found = socket.getaddrinfo(settings.listen_host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sockets = []
    for _ in range(settings.num_workers):
        one = socket.socket(family, kind, protocol)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(address)
        sockets.append(one)
    return sockets


def _account(settings: Settings) -> Account | None:
    """The user that the server runs as when root starts it; None where it keeps its user."""
    if os.geteuid() != 0:
        return None
    try:
        return account_for(settings.queen_data_dir / "postgres" / "cluster")
    except EmbeddedPostgresError as error:
        if settings.embedded:
            raise
        _log.warning("workers run as root: %s", error)
        return None


def _can_run(account: Account, command: Sequence[str]) -> bool:
    programs = [path for path in map(Path, command) if path.is_file()]
    needed = (*programs, Path(os.__file__), Path(sys.prefix), Path(queen.__file__))
    unreadable = next((path for path in needed if not account.can_read(path)), None)
    if unreadable is None:
        return True
    _log.warning(
        "workers run as root, because the user %s may not read %s: install Queen where all may read it, such as /opt, "
        "or start it as an unprivileged user",
        account.name,
        unreadable,
    )
    return False
