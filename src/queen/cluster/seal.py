"""The frame around a packet, signed when the hosts share a secret."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from enum import StrEnum

_MAGIC = b"qp1"
_PLAIN, _SIGNED = b"\x00", b"\x01"
_HEAD = len(_MAGIC) + 1
_MAC = 32


class Refusal(StrEnum):
    """Why a packet that came in was not taken."""

    MALFORMED = "malformed"
    UNSIGNED = "unsigned"
    FORGED = "forged"
    STALE = "stale"
    REPLAYED = "replayed"


class Refused(Exception):
    """A packet that is not taken."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Sealer:
    """Puts bodies into frames and takes them out. The first key signs, every key verifies; without keys all is open."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    @property
    def signs(self) -> bool:
        return bool(self._keys)

    def seal(self, body: bytes) -> bytes:
        if not self._keys:
            return plain_frame(body)
        framed = _MAGIC + _SIGNED + body
        return framed + _mac(self._keys[0], framed)

    def open(self, frame: bytes) -> bytes:
        """The body of a frame. Who has no key takes a signed one as it is, so that signing can be introduced."""
        flag = frame[len(_MAGIC) : _HEAD]
        if not is_frame(frame) or flag not in (_PLAIN, _SIGNED):
            raise Refused(Refusal.MALFORMED)
        if flag == _PLAIN:
            if self._keys:
                raise Refused(Refusal.UNSIGNED)
            return frame[_HEAD:]
        if len(frame) < _HEAD + _MAC:
            raise Refused(Refusal.MALFORMED)
        framed, mac = frame[:-_MAC], frame[-_MAC:]
        if self._keys and not any(hmac.compare_digest(_mac(key, framed), mac) for key in self._keys):
            raise Refused(Refusal.FORGED)
        return framed[_HEAD:]


def is_frame(data: bytes) -> bool:
    """Whether data looks like a packet, and not like a datagram of the local bus."""
    return data.startswith(_MAGIC)


def plain_frame(body: bytes) -> bytes:
    """A frame without a signature, for those who share a directory and need none."""
    return _MAGIC + _PLAIN + body


def _mac(key: bytes, framed: bytes) -> bytes:
    return hmac.digest(key, framed, "sha256")
