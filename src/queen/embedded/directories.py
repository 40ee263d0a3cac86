"""Lock of a data directory, released by the kernel when its process dies; and the socket directory."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from queen.embedded.account import Account
from queen.embedded.errors import EmbeddedPostgresError
from queen.files import try_lock


class DirectoryLock:
    """A lock on the file `path`, which contains the process id of its holder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock; raises with the holder's process id. Idempotent."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if not try_lock(descriptor):
            holder = os.read(descriptor, 20).decode(errors="replace").strip()
            os.close(descriptor)
            raise EmbeddedPostgresError(
                f"{self._path.parent} is in use by another Queen (process {holder}): stop that one, "
                "or choose another directory with --data-dir or QUEEN_DATA_DIR"
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


# The limit is 107 bytes on Linux, 103 on macOS.
_MAX_SOCKET_PATH = 103
# Would need quoting in unix_socket_directories.
_QUOTED = set(",\"'\\@")


def choose_socket_dir(data_dir: Path, port: int, account: Account) -> Path:
    """`data_dir`, or a private temporary directory if its path is too long for a socket."""
    if _usable(data_dir, port):
        return data_dir
    name = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    directory = Path(tempfile.gettempdir()).resolve() / f"queen-{account.uid}-{name}"
    if not _usable(directory, port):
        raise EmbeddedPostgresError(
            f"the paths {data_dir} and {directory} cannot be used for a Unix socket: "
            "choose a shorter data directory, or set TMPDIR to a shorter one"
        )
    if not directory.exists():
        directory.mkdir(mode=0o700)
        account.chown(directory)
    found = directory.lstat()
    # The temporary directory is writable for all users: another user must not own our socket directory.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid or found.st_mode & 0o077:
        raise EmbeddedPostgresError(f"{directory} is not a private directory of {account.name}: remove it")
    return directory


def socket_path(directory: Path, port: int) -> Path:
    return directory / f".s.PGSQL.{port}"


def _usable(directory: Path, port: int) -> bool:
    path = socket_path(directory, port)
    return len(os.fsencode(path)) <= _MAX_SOCKET_PATH and not _QUOTED & set(str(path))
