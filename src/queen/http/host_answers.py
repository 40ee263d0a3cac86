"""Answers that the workers of a host find for each other, in files of the directory that they share."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from queen.http.message import Response

log = logging.getLogger(__name__)

# So many files at most, whatever is asked for; two answers of one file take turns.
_SLOTS: Final = 256
_MOST_BYTES: Final = 4 * 1024 * 1024


class Found(msgspec.Struct, array_like=True, frozen=True):
    """An answer, and until when (of the clock that all processes of the host share) it is given again."""

    key: str
    good_until: float
    status: int
    body: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def response(self) -> Response:
        return Response(self.status, self.body, self.content_type, self.headers)


@dataclass(frozen=True, slots=True)
class Claim:
    """This worker finds an answer, and the others of its host wait for it. Ends with the process that has it."""

    file: int

    def end(self) -> None:
        os.close(self.file)


class HostAnswers:
    """Looks for answers of other workers, and leaves answers for them. Everything here waits for the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def look(self, key: str, now: float) -> Found | Claim | None:
        """The answer when another worker has it, else the right to find it; None while another finds it."""
        path = self._path(key)
        if (found := _read(path, key, now)) is not None:
            return found
        file = os.open(path.with_suffix(".claim"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        # It may have been found between the look and the claim.
        if (found := _read(path, key, now)) is not None:
            os.close(file)
            return found
        return Claim(file)

    def leave(self, key: str, good_until: float, response: Response) -> None:
        """Give the others an answer, for which this worker has the claim."""
        if len(response.body) > _MOST_BYTES:
            return
        path = self._path(key)
        draft = path.with_suffix(".draft")
        draft.write_bytes(
            msgspec.msgpack.encode(
                Found(key, good_until, response.status, bytes(response.body), response.content_type, response.headers)
            )
        )
        draft.replace(path)

    def _path(self, key: str) -> Path:
        slot = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % _SLOTS
        return self._directory / f"answer-{slot}"


def _read(path: Path, key: str, now: float) -> Found | None:
    try:
        found = _DECODER.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s cannot be read, so its answer is found anew: %s", path, error)
        return None
    return found if found.key == key and found.good_until > now else None


_DECODER: Final = msgspec.msgpack.Decoder(Found)
