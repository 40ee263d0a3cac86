"""The format of a spool file: a header with the id of the file, then frames.

A frame is a mark, the length and the checksum of its body, and the body. The checksum is seeded with the file's id, so
that bytes which only look like a frame, in a payload or from another file, are not taken for one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from queen.files import sync, try_lock
from queen.spool.record import Record, decode_record, encode_record

_SIGNATURE = b"QUEENSP1"
_FRAME = struct.Struct("<4sIQ")
_MARK = b"\xf5Qr\n"
HEADER_BYTES = len(_SIGNATURE) + 16
FRAME_BYTES = _FRAME.size


def file_header(file_id: uuid.UUID) -> bytes:
    return _SIGNATURE + file_id.bytes


def parse_header(data: bytes) -> uuid.UUID | None:
    """The id of a file, or None when it does not begin like a spool file."""
    if len(data) < HEADER_BYTES or not data.startswith(_SIGNATURE):
        return None
    return uuid.UUID(bytes=data[len(_SIGNATURE) : HEADER_BYTES])


def frame(body: bytes, file_id: uuid.UUID) -> bytes:
    return _FRAME.pack(_MARK, len(body), _checksum(body, file_id)) + body


def read_frame(file: int, at: int, size: int, file_id: uuid.UUID) -> bytes | None:
    """The body of the frame at a position of an open file of that size, or None when no whole frame is there."""
    head = os.pread(file, FRAME_BYTES, at)
    if len(head) < FRAME_BYTES:
        return None
    mark, length, checksum = _FRAME.unpack(head)
    if mark != _MARK or at + FRAME_BYTES + length > size:
        return None
    body = os.pread(file, length, at + FRAME_BYTES)
    return body if len(body) == length and _checksum(body, file_id) == checksum else None


def find_frame(file: int, after: int, size: int, file_id: uuid.UUID) -> int:
    """Where the next whole frame begins after a position; the size of the file when there is none."""
    rest = os.pread(file, max(0, size - after), after)
    at = rest.find(_MARK, 1)
    while at >= 0:
        if read_frame(file, after + at, size, file_id) is not None:
            return after + at
        at = rest.find(_MARK, at + 1)
    return size


def _checksum(body: bytes, file_id: uuid.UUID) -> int:
    return xxhash.xxh3_64_intdigest(body, file_id.int & 0xFFFF_FFFF_FFFF_FFFF)


log = logging.getLogger(__name__)

FAILED = "failed"
DAMAGED = "damaged"
REPLAYED = "replayed"
FINISHED = ".buf"
UNFINISHED = ".buf.tmp"
_ID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DIRECTORY_NAME = re.compile(_ID, re.ASCII)
_FILE_NAME = re.compile(_ID + r"\.buf(\.tmp)?", re.ASCII)
_LOCK = "lock"


def make_directory(path: Path) -> None:
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        sync(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a whole file, atomically and durably."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(file, content)
        os.fsync(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    partial.rename(path)
    sync(path.parent)


def write_all(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def directories(root: Path) -> list[Path]:
    """The sub-directories that processes write or wrote to, oldest first."""
    return sorted(path for path in root.iterdir() if _DIRECTORY_NAME.fullmatch(path.name) and path.is_dir())


def spool_files(directory: Path) -> list[Path]:
    """The files of one sub-directory, oldest first."""
    return sorted(path for path in directory.iterdir() if _FILE_NAME.fullmatch(path.name))


def claim_directory(directory: Path) -> int:
    """Lock a sub-directory for the life of this process; returns the lock, to be closed at the end."""
    make_directory(directory)
    file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def remove_directory(directory: Path) -> None:
    """Remove the empty directory of a dead process; one that holds other files stays."""
    (directory / _LOCK).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError as error:
        log.warning("unused spool directory %s not removed: %s", directory, error)


def is_written_to(directory: Path) -> bool:
    """Whether the process that made a sub-directory is alive."""
    try:
        file = os.open(directory / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(file)
    finally:
        os.close(file)


def left_records(root: Path) -> Iterator[tuple[Record, int]]:
    """Every whole record of the spool and the bytes it takes."""
    for directory in directories(root):
        for path in spool_files(directory):
            yield from file_records(path)


def file_records(path: Path) -> Iterator[tuple[Record, int]]:
    """Every whole record of a file and the bytes it takes; what is not whole is skipped."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        file_id = parse_header(os.pread(file, HEADER_BYTES, 0))
        at = HEADER_BYTES
        while file_id is not None and at < size:
            body = read_frame(file, at, size, file_id)
            record = None if body is None else readable(body)
            if body is None:
                at = find_frame(file, at, size, file_id)
                continue
            at += FRAME_BYTES + len(body)
            if record is not None:
                yield record, FRAME_BYTES + len(body)
    finally:
        os.close(file)


def readable(body: bytes) -> Record | None:
    """The record in a whole frame, or None when it is of an unknown version."""
    try:
        return decode_record(body)
    except msgspec.DecodeError:
        return None


def single_record_file(record: Record) -> bytes:
    """The content of a file that holds one record."""
    file_id = uuid.uuid4()
    return file_header(file_id) + frame(encode_record(record), file_id)
