"""How a segment body is stored: compressed when that pays, encrypted when its queue asks for it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zstandard

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PLAIN = 0
_ZSTD, _ENCRYPTED = 1, 0x80
_COMPRESS_FROM = 2048
_KEY_NAME_BYTES = 4
_NONCE_BYTES = 12
_TAG_BYTES = 16


class EnvelopeError(ValueError):
    """A stored body cannot be opened; the message says why."""


class NoEncryptionKey(EnvelopeError):
    """Encryption was asked for and no key is configured (set QUEEN_ENCRYPTION_KEY)."""


class Envelope:
    """Seals and opens stored bodies. The first key encrypts; every key decrypts, found by its fingerprint."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._ciphers = {hashlib.sha256(key).digest()[:_KEY_NAME_BYTES]: _cipher(key) for key in keys}
        self._newest = next(iter(self._ciphers), None)
        self._compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()

    @property
    def can_encrypt(self) -> bool:
        return self._newest is not None

    @staticmethod
    def is_encrypted(stored: bytes) -> bool:
        return bool(stored) and bool(stored[0] & _ENCRYPTED)

    def seal(self, body: bytes, *, encrypt: bool = False) -> bytes:
        kind, content = PLAIN, body
        if len(body) >= _COMPRESS_FROM:
            packed = self._compressor.compress(body)
            if len(packed) < len(body) * 0.9:
                kind, content = _ZSTD, packed
        if not encrypt:
            return bytes((kind,)) + content
        if self._newest is None:
            raise NoEncryptionKey(NoEncryptionKey.__doc__)
        nonce = os.urandom(_NONCE_BYTES)
        head = bytes((kind | _ENCRYPTED,)) + self._newest + nonce
        return head + self._ciphers[self._newest].encrypt(nonce, content, head)

    def open(self, stored: bytes) -> bytes:
        if not stored:
            raise EnvelopeError("stored body is empty")
        kind, content = stored[0], stored[1:]
        if kind & _ENCRYPTED:
            content = self._decrypt(stored)
            kind &= ~_ENCRYPTED
        if kind == PLAIN:
            return content
        if kind == _ZSTD:
            try:
                return self._decompressor.decompress(content)
            except zstandard.ZstdError as error:
                raise EnvelopeError(f"stored body cannot be decompressed: {error}") from error
        raise EnvelopeError(f"stored body has unknown kind {kind}; it was written by a newer version")

    def _decrypt(self, stored: bytes) -> bytes:
        key_end = 1 + _KEY_NAME_BYTES
        head_end = key_end + _NONCE_BYTES
        if len(stored) < head_end + _TAG_BYTES:
            raise EnvelopeError("an encrypted message is cut short")
        name = stored[1:key_end]
        cipher = self._ciphers.get(name)
        if cipher is None:
            raise NoEncryptionKey(f"the key {name.hex()} that encrypted this message is not among QUEEN_ENCRYPTION_KEY")
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(stored[key_end:head_end], stored[head_end:], stored[:head_end])
        except InvalidTag as error:
            raise EnvelopeError("an encrypted message was altered or its key is wrong") from error


def _cipher(key: bytes) -> AESGCM:
    # Loaded where a key is configured: it takes 7 MB of each worker.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)
