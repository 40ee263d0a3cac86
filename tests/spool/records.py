"""Records of a spool that are numbers."""

from __future__ import annotations

from queen.spool.record import UNNUMBERED, Record


def record(number: int, payload: bytes = b"payload", partition: str = "p") -> Record:
    return Record(UNNUMBERED, 1.5, "q", partition, number.to_bytes(16, "big"), 1, [], payload)
