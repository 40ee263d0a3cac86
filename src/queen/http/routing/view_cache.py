"""Caching the responses of views, in the memory of a worker and in files that the workers of a host share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from queen.files import replace, try_lock
from queen.http.server.message import Handler, Request, Response
from queen.single_flight import Cached, SingleFlightCache

log = logging.getLogger(__name__)

# A bound on the number of files; two keys that share a file replace each other.
_SLOTS: Final = 256
_MOST_BYTES: Final = 4 * 1024 * 1024


def cached(handler: Handler, cache: SingleFlightCache[Response]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The handler, with its responses cached by path and query."""

    async def serve(request: Request) -> Response:
        async def compute() -> Response:
            result = handler(request)
            return result if isinstance(result, Response) else await result

        query = request.query
        key = json.dumps([request.path, *sorted(query.items())]) if query else request.path
        return await cache.get(key, compute)

    return serve


class _Entry(msgspec.Struct, array_like=True, frozen=True):
    """A response as it is written to a file."""

    key: str
    expires_at: float
    status: int
    body: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]


_decoder: Final = msgspec.msgpack.Decoder(_Entry)


@dataclass(frozen=True, slots=True)
class FileClaim:
    """A locked file; the lock ends with the process that has it."""

    file: int

    def end(self) -> None:
        os.close(self.file)


class HostViewCache:
    """Responses in files of a directory that the workers of a host share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def look(self, key: str, now: float) -> Cached[Response] | FileClaim | None:
        path = self._path(key)
        if (found := _read(path, key, now)) is not None:
            return found
        file = os.open(path.with_suffix(".claim"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(file):
            os.close(file)
            return None
        # It may have been written between the look and the claim.
        if (found := _read(path, key, now)) is not None:
            os.close(file)
            return found
        return FileClaim(file)

    def put(self, key: str, expires_at: float, value: Response) -> None:
        if len(value.body) > _MOST_BYTES:
            return
        entry = _Entry(key, expires_at, value.status, bytes(value.body), value.content_type, value.headers)
        replace(self._path(key), msgspec.msgpack.encode(entry))

    def _path(self, key: str) -> Path:
        slot = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % _SLOTS
        return self._directory / f"answer-{slot}"


def _read(path: Path, key: str, now: float) -> Cached[Response] | None:
    try:
        entry = _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is not readable and is replaced: %s", path, error)
        return None
    if entry.key != key or entry.expires_at <= now:
        return None
    return Cached(Response(entry.status, entry.body, entry.content_type, entry.headers), entry.expires_at)
