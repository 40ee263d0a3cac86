"""Request heads that were read before: the same bytes mean the same again."""

from __future__ import annotations

from typing import Final, NamedTuple

from queen.http.router import Match

LONGEST_HEAD: Final = 2048
CACHED_HEADS: Final = 1024


class KnownHead(NamedTuple):
    """What a head turned out to mean, and how long a body follows it."""

    match: Match
    headers: dict[bytes, bytes]
    body_bytes: int


class HeadCache:
    """Heads by their bytes. Clients repeat theirs, apart from the length of the body, request after request."""

    def __init__(self) -> None:
        # Two generations bound the cache without any bookkeeping per hit: a full `recent` becomes `older`.
        self._recent: dict[bytes, KnownHead] = {}
        self._older: dict[bytes, KnownHead] = {}

    def get(self, head: bytes) -> KnownHead | None:
        known = self._recent.get(head)
        if known is None:
            known = self._older.get(head)
            if known is not None:
                self.put(head, known)
        return known

    def put(self, head: bytes, known: KnownHead) -> None:
        if len(head) > LONGEST_HEAD:
            return
        if len(self._recent) >= CACHED_HEADS:
            self._older = self._recent
            self._recent = {}
        self._recent[head] = known
