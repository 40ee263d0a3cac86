"""The system user that PostgreSQL runs as, since it refuses to run as root."""

import logging
import os
import pwd
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from queen.embedded.errors import EmbeddedPostgresError

_log = logging.getLogger(__name__)

# Created when Queen is started by root.
_SERVICE_USER = "queen"


class ProcessOwner(TypedDict, total=False):
    """The arguments of subprocess.Popen that set the user of a process."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True, slots=True)
class Account:
    """The user that owns the data and runs PostgreSQL; `switched` if it is not the user of this process."""

    name: str
    uid: int
    gid: int
    switched: bool

    @property
    def process_owner(self) -> ProcessOwner:
        if not self.switched:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def chown(self, path: Path) -> None:
        """Make this account the owner of `path`."""
        if self.switched:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def grant_search(self, path: Path) -> None:
        """Make all parent directories of `path` searchable for this account."""
        if not self.switched:
            return
        for directory in path.resolve().parents:
            mode = directory.stat()
            if self._may_enter(mode):
                continue
            # o+x permits neither listing the directory nor reading its files.
            directory.chmod(stat.S_IMODE(mode.st_mode) | stat.S_IXOTH)
            _log.warning(
                "changed permissions of %s (chmod o+x): PostgreSQL cannot run as root and runs as user %s",
                directory,
                self.name,
            )

    def grant_execute(self, programs: Path) -> None:
        """Make the installation with the `bin` directory `programs` executable for this account."""
        if not self.switched:
            return
        self.grant_search(programs / "postgres")
        if (programs / "postgres").stat().st_mode & stat.S_IXOTH:
            return
        # Installed under a strict umask: make programs, libraries and data readable.
        for directory, _, files in os.walk(programs.parent):
            for path in (Path(directory), *(Path(directory, file) for file in files)):
                mode = stat.S_IMODE(path.stat().st_mode)
                execute = stat.S_IXOTH if mode & stat.S_IXUSR else 0
                path.chmod(mode | stat.S_IROTH | execute)

    def _may_enter(self, directory: os.stat_result) -> bool:
        if directory.st_uid == self.uid:
            return bool(directory.st_mode & stat.S_IXUSR)
        if directory.st_gid == self.gid:
            return bool(directory.st_mode & stat.S_IXGRP)
        return bool(directory.st_mode & stat.S_IXOTH)


def account_for(cluster: Path) -> Account:
    """The user that runs PostgreSQL on `cluster`: this user; for root the cluster's owner, or a service user."""
    me = os.geteuid()
    if me != 0:
        return Account(name=_name_of(me), uid=me, gid=os.getegid(), switched=False)
    if cluster.exists() and (owner := cluster.stat()).st_uid != 0:
        return Account(name=_name_of(owner.st_uid), uid=owner.st_uid, gid=owner.st_gid, switched=True)
    entry = _service_user()
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, switched=True)


def check_owner(path: Path, account: Account) -> None:
    """Reject a directory owned by another user, with a clearer error than PostgreSQL's."""
    owner = path.stat().st_uid
    if owner != account.uid:
        raise EmbeddedPostgresError(
            f"{path} is owned by {_name_of(owner)}, but PostgreSQL would run as {account.name}: "
            f"start Queen as {_name_of(owner)}, or choose another directory with --data-dir or QUEEN_DATA_DIR"
        )


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"the user with id {uid}"


def _service_user() -> pwd.struct_passwd:
    failure = ""
    for _ in range(20):
        try:
            return pwd.getpwnam(_SERVICE_USER)
        except KeyError:
            failure = _add_service_user()
        # Another process may be adding it and hold the lock on /etc/passwd.
        time.sleep(0.1)
    raise EmbeddedPostgresError(
        f"PostgreSQL cannot run as root, and adding the user {_SERVICE_USER!r} failed ({failure}): "
        f"start Queen as an unprivileged user, or add a system user named {_SERVICE_USER!r}"
    )


def _add_service_user() -> str:
    command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _SERVICE_USER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        return f"useradd: {error.strerror}"
    return done.stderr.strip()
