"""Packets between hosts: events and heartbeats, many of them in one packet."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Raw

Event: TypeAlias = tuple[str, int, int, int, int, str]
"""(kind, queue id, partition id, group id, number, name); this package does not know the kinds."""

ROUTE = "/internal/api/events"
"""Where a host takes packets over HTTP."""

_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_LONGEST_NAME = 300
# What a packet takes beside its events: the frame, the signature, and the fields before them.
_OVERHEAD = 96


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """Shows that a host is alive. `to` is the address it was sent to, by which a host recognises itself as a peer."""

    name: str
    to: str
    leaving: bool = False


class Packet(msgspec.Struct, array_like=True):
    """One message from a worker of one host to another host."""

    boot: _Number
    """The number of this start of the host; the same for all its workers."""
    sender: _Number
    """The worker process."""
    sequence: _Number
    """Grows with every packet of a sender."""
    sent_ms: _Number
    events: list[tuple[str, _Number, _Number, _Number, _Number, str]] = []
    heartbeat: Heartbeat | None = None


class _Outgoing(msgspec.Struct, array_like=True):
    """A packet whose events are encoded already."""

    boot: int
    sender: int
    sequence: int
    sent_ms: int
    events: list[msgspec.Raw]
    heartbeat: Heartbeat | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


def encode_events(events: Iterable[Event], room: int) -> Iterator[list[msgspec.Raw]]:
    """Events in portions, each of which makes a packet of at most `room` bytes; a larger event goes alone."""
    some: list[msgspec.Raw] = []
    left = room - _OVERHEAD
    for event in events:
        encoded = _encoder.encode(event)
        if some and len(encoded) > left:
            yield some
            some, left = [], room - _OVERHEAD
        some.append(msgspec.Raw(encoded))
        left -= len(encoded)
    if some:
        yield some


def encode_packet(
    boot: int, sender: int, sequence: int, sent_ms: int, events: list[msgspec.Raw], heartbeat: Heartbeat | None
) -> bytes:
    return _encoder.encode(_Outgoing(boot, sender, sequence, sent_ms, events, heartbeat))


def decode_packet(body: bytes) -> Packet:
    """Raises msgspec.DecodeError (ValidationError is one) for anything but a packet."""
    return _decoder.decode(body)


_MAGIC = b"qp1"
_PLAIN, _SIGNED = b"\x00", b"\x01"
_HEAD = len(_MAGIC) + 1
_MAC = 32


class PacketRefusal(StrEnum):
    """Why a packet that came in was not taken."""

    MALFORMED = "malformed"
    UNSIGNED = "unsigned"
    FORGED = "forged"
    STALE = "stale"
    REPLAYED = "replayed"
    UNEXPECTED = "unexpected"


class PacketRefused(Exception):
    """A packet that is not taken."""

    def __init__(self, reason: PacketRefusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


class PacketSigner:
    """Signs and verifies frames. The first key signs, every key verifies; without keys none is signed."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    @property
    def signs(self) -> bool:
        return bool(self._keys)

    def sign(self, body: bytes) -> bytes:
        if not self._keys:
            return plain_frame(body)
        framed = _MAGIC + _SIGNED + body
        return framed + _mac(self._keys[0], framed)

    def verify(self, frame: bytes) -> bytes:
        """The body of a frame. Who has no key takes a signed one as it is, so that signing can be introduced."""
        flag = frame[len(_MAGIC) : _HEAD]
        if not is_frame(frame) or flag not in (_PLAIN, _SIGNED):
            raise PacketRefused(PacketRefusal.MALFORMED)
        if flag == _PLAIN:
            if self._keys:
                raise PacketRefused(PacketRefusal.UNSIGNED)
            return frame[_HEAD:]
        if len(frame) < _HEAD + _MAC:
            raise PacketRefused(PacketRefusal.MALFORMED)
        framed, mac = frame[:-_MAC], frame[-_MAC:]
        if self._keys and not any(hmac.compare_digest(_mac(key, framed), mac) for key in self._keys):
            raise PacketRefused(PacketRefusal.FORGED)
        return framed[_HEAD:]


def is_frame(data: bytes) -> bool:
    """Whether data looks like a packet, and not like a datagram of the local bus."""
    return data.startswith(_MAGIC)


def plain_frame(body: bytes) -> bytes:
    """A frame without a signature, for workers that share a directory and need none."""
    return _MAGIC + _PLAIN + body


def _mac(key: bytes, framed: bytes) -> bytes:
    return hmac.digest(key, framed, "sha256")


_WIDTH = 1024
_MASK = (1 << _WIDTH) - 1
_MOST_SENDERS = 4096


class ReplayGuard:
    """Remembers, for each sender, the newest sequence number and which of the 1024 before it have come.

    Packets may overtake each other on their way; what is further behind than that counts as a replay.
    """

    def __init__(self) -> None:
        self._senders: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def admit(self, sender: int, sequence: int) -> bool:
        """Whether this packet is new; it is not any more afterwards."""
        newest, came = self._senders.get(sender, (sequence, 0))
        ahead = sequence - newest
        if ahead > 0:
            came = (came << ahead) & _MASK if ahead < _WIDTH else 0
            newest, ahead = sequence, 0
        bit = 1 << -ahead
        if -ahead >= _WIDTH or came & bit:
            return False
        self._senders[sender] = (newest, came | bit)
        self._senders.move_to_end(sender)
        if len(self._senders) > _MOST_SENDERS:
            # The one that has sent nothing for longest: its packets are stale by now.
            self._senders.popitem(last=False)
        return True


FRESH_SECONDS = 30.0
LARGEST_FRAME = 60_000
"""What a datagram of the local bus holds, by which it is passed on."""


class PacketValidator:
    """Decodes frames. Age and replay are checked only with a secret: without one, packets can be forged anyway."""

    def __init__(self, signer: PacketSigner, clock: Callable[[], float] = time.time) -> None:
        self._signer = signer
        self._guard = ReplayGuard()
        self._clock = clock

    def admit(self, frame: bytes) -> tuple[Packet, bytes]:
        """The packet and its bare body; raises `PacketRefused`."""
        if len(frame) > LARGEST_FRAME:
            raise PacketRefused(PacketRefusal.MALFORMED)
        body = self._signer.verify(frame)
        packet = decode(body)
        if self._signer.signs:
            if abs(self._clock() - packet.sent_ms / 1000) > FRESH_SECONDS:
                raise PacketRefused(PacketRefusal.STALE)
            if not self._guard.admit(packet.sender, packet.sequence):
                raise PacketRefused(PacketRefusal.REPLAYED)
        return packet, body

    def note(self, packet: Packet) -> None:
        """Another worker of this host has admitted the packet: it must not be admitted here again."""
        if self._signer.signs:
            self._guard.admit(packet.sender, packet.sequence)


def decode(body: bytes) -> Packet:
    """A packet from its body; raises `PacketRefused`."""
    try:
        packet = decode_packet(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PacketRefused(PacketRefusal.MALFORMED) from error
    # The name goes to the log.
    if packet.heartbeat is not None and not _is_name(packet.heartbeat.name):
        raise PacketRefused(PacketRefusal.MALFORMED)
    return packet


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _LONGEST_NAME and name.isascii() and name.isprintable()


def boot_number(directory: Path) -> int:
    """The number of this start of this host. The first worker draws it, and leaves it in the directory they share."""
    path = directory / "boot"
    draft = directory / f"boot.{os.getpid()}.{secrets.token_hex(4)}"
    draft.write_text(str(draw_number()))
    try:
        # A link appears with its content, and only if no other process was faster.
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return int(path.read_text())


def draw_number() -> int:
    return secrets.randbits(62)


def server_name(port: int) -> str:
    """What the host calls itself; the same after a restart."""
    return f"{socket.gethostname()}:{port}"


class PacketWriter:
    """Numbers packets one after the other, and signs them."""

    def __init__(self, boot: int, signer: PacketSigner) -> None:
        self._boot = boot
        self._signer = signer
        self._sender = draw_number()
        self._sequence = 0

    def events(self, events: Iterable[Event], room: int) -> Iterator[tuple[bytes, int]]:
        """Frames of at most `room` bytes (unless one event needs more), each with the number of events in it."""
        for some in encode_events(events, room):
            yield self._encode(some, None), len(some)

    def heartbeat(self, heartbeat: Heartbeat) -> bytes:
        return self._encode([], heartbeat)

    def _encode(self, events: list[Raw], heartbeat: Heartbeat | None) -> bytes:
        self._sequence += 1
        sent_ms = int(time.time() * 1000)
        return self._signer.sign(encode_packet(self._boot, self._sender, self._sequence, sent_ms, events, heartbeat))
