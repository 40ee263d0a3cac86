"""The binary bodies of a push (`QPB1`) and of a transaction (`QTB1`), as newer clients send them.

Integers are little-endian; a name is preceded by its length in 16 bits, a payload by its length in 32.

    "QPB1" flags [length when unpacked] groups; of each: queue, partition, how many messages, and these
    "QTB1" flags length head groups; the head is the JSON of a transaction without its pushes

With `FRAMES`, which transactions always have, the messages of a group are one zstd frame of records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import zstandard

from queen.errors import BadRequest
from queen.wire.push import PushItem, check_items, check_utf8

MAGIC: Final = b"QPB1"
TRANSACTION_MAGIC: Final = b"QTB1"
MEDIA_TYPE: Final = "application/x-queen-push"
MOST_BYTES: Final = 64 << 20
"""What a compressed body may unpack to at most."""

_LOOSE_BYTES: Final = 8 << 20
_MOST_RATIO: Final = 32
"""What unpacks to more than `_LOOSE_BYTES` has to be worth sending: a few bytes must not cost what megabytes do."""

MOST_ITEMS: Final = 100_000
MOST_TRANSACTION_ITEMS: Final = 10_000

_ZSTD, _COUNTS, _TRANSACTIONS, _FRAMES = 1, 2, 4, 8
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_HEAD: Final = 1 + 16
"""Flags and message id of a record. The id is not kept: the server gives each message one of its own."""

_raws = msgspec.json.Decoder(list[msgspec.Raw])
_raw = msgspec.json.Decoder(msgspec.Raw)


class BinaryPush(msgspec.Struct):
    """The items of a binary body, how many bytes they are unpacked, and whether only counts are wanted as answer."""

    items: list[PushItem]
    nbytes: int
    counts: bool


class _Reader:
    """Reads fields one after the other. Raises `BadRequest` when the bytes end too early."""

    def __init__(self, data: bytes, what: str, most: int = 0) -> None:
        self.data = data
        self.most = most
        self.items = 0
        self.at = 0
        self.what = what

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.data):
            raise BadRequest(f"Invalid {self.what}: it ends early, at byte {len(self.data)}")
        piece, self.at = self.data[self.at : end], end
        return piece

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return int(_U16.unpack(self.take(2))[0])

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def count(self) -> int:
        """How many messages come. Raises `BadRequest` when they are too many in all."""
        count = self.u32()
        self.items += count
        if self.items > self.most:
            raise BadRequest(f"Invalid {self.what}: it has more than {self.most} messages")
        return count

    def text(self) -> str:
        at = self.at
        try:
            return self.take(self.u16()).decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"Invalid {self.what}: not UTF-8 at byte {at + 2 + error.start}") from error

    def end(self) -> None:
        if self.at != len(self.data):
            raise BadRequest(f"Invalid {self.what}: {len(self.data) - self.at} bytes too many at byte {self.at}")


def decode_binary_push(body: bytes, most: int = MOST_ITEMS) -> BinaryPush:
    """The items of a binary push, at most `most`, each valid. Raises `BadRequest` that says what is wrong."""
    reader = _Reader(body, "binary push", most)
    reader.take(len(MAGIC))
    flags = _flags(reader, _ZSTD | _COUNTS | _TRANSACTIONS | _FRAMES)
    if flags & _FRAMES:
        if flags & (_ZSTD | _TRANSACTIONS):
            raise BadRequest(f"Invalid binary push: flags {flags} exclude each other")
        items, nbytes = _framed_groups(reader, _most_unpacked(body))
    else:
        if flags & _ZSTD:
            length = reader.u32()
            plain = _unpacked(reader.take(len(body) - reader.at), _most_unpacked(body), reader.what)
            if len(plain) != length:
                raise BadRequest(f"Invalid binary push: it unpacks to {len(plain)} bytes, not {length}")
            reader = _Reader(plain, reader.what, most)
        items, nbytes = _groups(reader, named=bool(flags & _TRANSACTIONS)), len(reader.data)
    reader.end()
    return BinaryPush(items, nbytes, bool(flags & _COUNTS))


def decode_binary_transaction(body: bytes) -> tuple[bytes, BinaryPush]:
    """The JSON of a binary transaction (empty: it has none), and what it pushes."""
    reader = _Reader(body, "binary transaction", MOST_TRANSACTION_ITEMS)
    reader.take(len(TRANSACTION_MAGIC))
    flags = _flags(reader, _COUNTS)
    head = reader.take(reader.u32())
    items, nbytes = _framed_groups(reader, _most_unpacked(body))
    reader.end()
    return head, BinaryPush(items, nbytes, bool(flags & _COUNTS))


def unpacked_bytes(body: bytes) -> int:
    """How many bytes a binary body says that it unpacks to; 0 where nothing is packed. Raises `BadRequest`."""
    reader = _Reader(body, "binary transaction" if body.startswith(TRANSACTION_MAGIC) else "binary push")
    reader.take(len(MAGIC))
    flags = reader.u8()
    if body.startswith(TRANSACTION_MAGIC):
        reader.take(reader.u32())
    elif flags & _ZSTD:
        reader.u32()
        return _content_size(reader.take(len(body) - reader.at), reader.what)
    elif not flags & _FRAMES:
        return 0
    nbytes = 0
    for _ in range(reader.u32()):
        reader.text(), reader.text(), reader.u32()
        nbytes += _content_size(reader.take(reader.u32()), reader.what)
    return nbytes


def _most_unpacked(body: bytes) -> int:
    return min(MOST_BYTES, max(_LOOSE_BYTES, _MOST_RATIO * len(body)))


def _flags(reader: _Reader, known: int) -> int:
    flags = reader.u8()
    if flags & ~known:
        raise BadRequest(f"Invalid {reader.what}: unknown flags {flags & ~known}")
    return flags


def _groups(reader: _Reader, *, named: bool) -> list[PushItem]:
    items: list[PushItem] = []
    for _ in range(reader.u32()):
        queue, partition = reader.text(), reader.text()
        for _ in range(reader.count()):
            transaction_id = reader.text() if named else ""
            items.append(PushItem(queue, partition, msgspec.Raw(reader.take(reader.u32())), transaction_id))
    return _checked(items)


def _framed_groups(reader: _Reader, most: int) -> tuple[list[PushItem], int]:
    items: list[PushItem] = []
    nbytes = 0
    for group in range(reader.u32()):
        queue, partition, count = reader.text(), reader.text(), reader.count()
        what = f"{reader.what} at group {group}"
        frames = _Reader(_unpacked(reader.take(reader.u32()), most - nbytes, what), what)
        nbytes += len(frames.data)
        for _ in range(count):
            record = _Reader(frames.take(frames.u32()), f"{what}: record at byte {frames.at}")
            if record.take(_HEAD)[0]:
                raise BadRequest(f"Invalid {record.what}: its flags have to be 0")
            transaction_id = record.text()
            payload = msgspec.Raw(record.take(len(record.data) - record.at))
            items.append(PushItem(queue, partition, payload, transaction_id))
        frames.end()
    return _checked(items), nbytes


def _unpacked(frame: bytes, most: int, what: str) -> bytes:
    """The content of a zstd frame, whose header has to give its size."""
    size = _content_size(frame, what)
    if size > most:
        raise BadRequest(f"Invalid {what}: it unpacks to {size} bytes, and at most {most} are taken")
    try:
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise BadRequest(f"Invalid {what}: {error}") from error


def _content_size(frame: bytes, what: str) -> int:
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise BadRequest(f"Invalid {what}: {error}") from error
    if size < 0:
        raise BadRequest(f"Invalid {what}: its zstd frame does not say how many bytes it holds")
    return int(size)


def _checked(items: list[PushItem]) -> list[PushItem]:
    check_items(items)
    if not items:
        return items
    payloads = [bytes(item.payload) for item in items]
    together = b"[" + b",".join(payloads) + b"]"
    check_utf8(together)
    try:
        # All at once; those that take part in each other do not come out as they went in.
        if [bytes(raw) for raw in _raws.decode(together)] == payloads:
            return items
    except (msgspec.DecodeError, RecursionError):
        pass
    _check_each(payloads)
    return items


def _check_each(payloads: Sequence[bytes]) -> None:
    for index, payload in enumerate(payloads):
        try:
            _raw.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequest(f"Payload is not one JSON document: {error} (at items[{index}].payload)") from error
