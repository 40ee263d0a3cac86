"""The system user that PostgreSQL and the workers run as when the server is started by root."""

import logging
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from queen.embedded.errors import EmbeddedPostgresError
from queen.settings import SYSTEM_DATA_DIR

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

    def own(self, directory: Path) -> None:
        """Make this account the owner of a directory, and of what root owns in it."""
        if not self.switched:
            return
        for parent, directories, files in os.walk(directory):
            for path in (Path(parent), *(Path(parent, name) for name in (*directories, *files))):
                found = path.lstat()
                # A file with another name elsewhere may not be what it looks like.
                if found.st_uid == 0 and (found.st_nlink == 1 or stat.S_ISDIR(found.st_mode)):
                    self.chown(path)

    def check_reach(self, path: Path) -> None:
        """Raises `EmbeddedPostgresError` unless this account may enter all parent directories of `path`."""
        if not self.switched:
            return
        for directory in path.resolve().parents:
            if self._may_enter(directory.stat()) or _open_temporary(directory):
                continue
            raise EmbeddedPostgresError(
                f"{path} lies in {directory}, which the user {self.name} may not enter, and nothing that root starts "
                f"runs as root: choose another directory with --data-dir or QUEEN_DATA_DIR, such as {SYSTEM_DATA_DIR}, "
                "or start Queen as an unprivileged user"
            )

    def can_read(self, path: Path) -> bool:
        """Whether this account may read a file, or look into a directory."""
        if not self.switched:
            return True
        path = path.resolve()
        found = path.stat()
        if not all(self._may_enter(directory.stat()) for directory in path.parents):
            return False
        return self._may(found, stat.S_IRUSR) and (not path.is_dir() or self._may_enter(found))

    def reachable_programs(self, programs: Path, directory: Path) -> Path:
        """The `bin` directory of an installation that this account may run: `programs`, or a copy in `directory`."""
        if self.can_read(programs / "postgres") and self._may((programs / "postgres").stat(), stat.S_IXUSR):
            return programs
        copy = directory / programs.parent.name
        if not (copy / "bin" / "postgres").exists():
            _log.info("copying PostgreSQL to %s, where the user %s may run it", copy, self.name)
            unfinished = directory / f"{copy.name}.new"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(programs.parent, unfinished, symlinks=True)
            self.own(unfinished)
            unfinished.rename(copy)
        return copy / "bin"

    def _may(self, found: os.stat_result, right: int) -> bool:
        """Whether this account has a right (given as the owner's bit)."""
        if found.st_uid == self.uid:
            return bool(found.st_mode & right)
        return bool(found.st_mode & (right >> 3 if found.st_gid == self.gid else right >> 6))

    def _may_enter(self, directory: os.stat_result) -> bool:
        return self._may(directory, stat.S_IXUSR)


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


def _open_temporary(directory: Path) -> bool:
    """Let others pass through a private directory of root in the temporary directory: it is not a home directory."""
    if Path(tempfile.gettempdir()).resolve() not in directory.parents or directory.stat().st_uid != 0:
        return False
    # o+x permits neither listing the directory nor reading its files.
    directory.chmod(stat.S_IMODE(directory.stat().st_mode) | stat.S_IXOTH)
    return True


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
