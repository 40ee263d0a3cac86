"""Stored bodies: opened as they were sealed, or not at all."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.wire.envelope import Envelope, EnvelopeError, NoEncryptionKey

OLD, NEW = bytes(range(32)), bytes(range(32, 64))

bodies = st.binary(max_size=200) | st.binary(min_size=1, max_size=8).map(lambda piece: piece * 500)


@given(bodies, st.booleans())
def test_a_sealed_body_opens_as_it_was(body: bytes, encrypt: bool) -> None:
    envelope = Envelope([OLD])
    assert envelope.open(envelope.seal(body, encrypt=encrypt)) == body


def test_what_compresses_is_stored_smaller_and_what_does_not_is_stored_as_it_is() -> None:
    envelope = Envelope()
    assert len(envelope.seal(b"the same again " * 200)) < 200
    noise = os.urandom(5000)
    assert envelope.seal(noise) == b"\x00" + noise


def test_the_newest_key_encrypts_and_older_ones_still_open() -> None:
    before, after = Envelope([OLD]), Envelope([NEW, OLD])
    stored = before.seal(b"secret", encrypt=True)
    assert after.open(stored) == b"secret"
    with pytest.raises(NoEncryptionKey, match="not among QUEEN_ENCRYPTION_KEY"):
        before.open(after.seal(b"secret", encrypt=True))


def test_encryption_hides_the_body_and_never_repeats_itself() -> None:
    envelope = Envelope([OLD])
    body = b"secret" * 200
    one, other = envelope.seal(body, encrypt=True), envelope.seal(body, encrypt=True)
    assert one != other
    assert b"secret" not in one


def test_without_a_key_nothing_is_encrypted_and_the_error_says_what_to_do() -> None:
    envelope = Envelope()
    assert not envelope.can_encrypt
    with pytest.raises(NoEncryptionKey, match="set QUEEN_ENCRYPTION_KEY"):
        envelope.seal(b"secret", encrypt=True)


@given(bodies, st.data())
def test_an_altered_encrypted_body_is_refused(body: bytes, data: st.DataObject) -> None:
    envelope = Envelope([OLD])
    stored = bytearray(envelope.seal(body, encrypt=True))
    stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        opened = envelope.open(bytes(stored))
    except EnvelopeError:
        return
    # Only the first byte may turn an encrypted body into one that claims to be plain.
    assert not stored[0] & 0x80
    assert opened != body


@given(st.binary(max_size=60))
def test_arbitrary_bytes_open_or_are_refused_with_a_reason(stored: bytes) -> None:
    try:
        Envelope([OLD]).open(stored)
    except EnvelopeError as error:
        assert str(error)


@given(st.integers(1, 1499))
def test_a_truncated_compressed_body_is_refused(length: int) -> None:
    envelope = Envelope()
    stored = envelope.seal(b"".join(b"%d," % number for number in range(1500)))
    with pytest.raises(EnvelopeError):
        envelope.open(stored[: min(length, len(stored) - 1)])
