"""One Queen per data directory: a lock that the kernel drops when its holder dies."""

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from queen.embedded.account import Account
from queen.embedded.errors import EmbeddedPostgresError


class DirectoryLock:
    """A lock on the file `path`, which holds the process id of the holder for people to read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock, or say who has it. Taking it twice is fine."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode(errors="replace").strip()
            os.close(descriptor)
            raise EmbeddedPostgresError(
                f"{self._path.parent} is in use by another Queen (process {holder}): stop that one, "
                "or choose another directory with --data-dir or QUEEN_DATA_DIR"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# Linux takes 107 bytes, macOS 103.
_LONGEST_SOCKET_PATH = 103
# These would need quoting in PostgreSQL's list of directories.
_AWKWARD = set(",\"'\\@")


def choose_socket_dir(data_dir: Path, port: int, account: Account) -> Path:
    """`data_dir` itself, or a private directory among the temporary files when its path is too long."""
    if _usable(data_dir, port):
        return data_dir
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()).resolve() / f"queen-{account.uid}-{name}"
    if not _usable(directory, port):
        raise EmbeddedPostgresError(
            f"neither {data_dir} nor {directory} is short and plain enough for a socket: "
            "choose a shorter data directory, or set TMPDIR to a shorter one"
        )
    if not directory.exists():
        directory.mkdir(mode=0o700)
        account.give(directory)
    found = directory.lstat()
    # Anybody may write to the temporary directory; nobody else may own the way to our database.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid or found.st_mode & 0o077:
        raise EmbeddedPostgresError(
            f"{directory} should be a private directory of {account.name}, but is not: remove it"
        )
    return directory


def socket_path(directory: Path, port: int) -> Path:
    return directory / f".s.PGSQL.{port}"


def _usable(directory: Path, port: int) -> bool:
    path = socket_path(directory, port)
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH and not _AWKWARD & set(str(path))
