"""Where a table is: a directory of this machine, or a URL of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, cast

from queen.pipelines.errors import PipelineError, TablesMissing

TARGET_BYTES: Final = 128 * 2**20
"""Of a file. Larger ones are split, and smaller ones joined by a compaction."""
SCHEMES: Final = ("s3", "gs", "az", "abfss")
"""Object stores that delta-rs, PyIceberg and fsspec all know."""
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfss": "adlfs"}


@dataclass(frozen=True, slots=True)
class Location:
    """A directory. Credentials and endpoints of object stores come from the environment, as their own tools read it."""

    url: str
    """An absolute path, or a URL of an object store without a slash at its end."""

    @classmethod
    def parse(cls, text: str) -> Location:
        """Raises `PipelineError` for a kind of URL that tables cannot be kept at."""
        scheme, separator, rest = text.partition("://")
        if not separator:
            return cls(str(Path(text).absolute()))
        if scheme == "file":
            return cls(str(Path(rest).absolute()))
        if scheme not in SCHEMES or not rest.strip("/"):
            known = ", ".join(f"{one}://" for one in SCHEMES)
            raise PipelineError(f"{text}: expected a directory, or a URL that begins with {known} and names a bucket")
        return cls(text.rstrip("/"))

    @property
    def path(self) -> Path | None:
        """The directory, if it is one of this machine."""
        return None if "://" in self.url else Path(self.url)

    @property
    def uri(self) -> str:
        return self.url if self.path is None else f"file://{self.url}"

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def below(self, relative: str) -> str:
        return f"{self.url}/{relative}"

    def __str__(self) -> str:
        return self.url


def open_file(url: str, mode: str) -> IO[bytes]:
    """A file of a location, made with its directories if it is written."""
    if "://" not in url:
        path = Path(url)
        if "w" in mode:
            path.parent.mkdir(parents=True, exist_ok=True)
        return cast(IO[bytes], path.open(mode))
    with _object_store(url) as (filesystem, path_there):
        return cast(IO[bytes], filesystem.open(path_there, mode))


def exists(url: str) -> bool:
    if "://" not in url:
        return Path(url).exists()
    with _object_store(url) as (filesystem, path):
        # What another process wrote meanwhile is not in the listings that were read before.
        filesystem.invalidate_cache()
        return bool(filesystem.exists(path))


def list_files(url: str) -> Iterator[tuple[str, float]]:
    """Every file below a directory, and when it was written."""
    if "://" not in url:
        for path in Path(url).rglob("*"):
            if path.is_file():
                yield str(path), path.stat().st_mtime
        return
    with _object_store(url) as (filesystem, root):
        filesystem.invalidate_cache()
        found = filesystem.find(root, detail=True)
    scheme = url.partition("://")[0]
    for path, about in found.items():
        yield f"{scheme}://{path}", about["LastModified" if "LastModified" in about else "mtime"].timestamp()


def remove_files(urls: list[str]) -> None:
    for url in urls:
        if "://" not in url:
            Path(url).unlink(missing_ok=True)
        else:
            with _object_store(url) as (filesystem, path):
                filesystem.rm_file(path)


@contextmanager
def _object_store(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL, and the path in it. Raises `PipelineError`, however a store words what is wrong."""
    scheme = url.partition("://")[0]
    try:
        import fsspec

        yield fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise TablesMissing(f"{scheme}:// needs {_PACKAGES[scheme]}: pip install {_PACKAGES[scheme]}") from error
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise PipelineError(f"{url} cannot be reached: {why}. Check its bucket, endpoint and credentials") from error
