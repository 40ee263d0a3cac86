"""Request heads that were read before: the same bytes mean the same again."""

from __future__ import annotations

from typing import Final, NamedTuple

from queen.http.generations import Generations
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
        self._known: Generations[bytes, KnownHead] = Generations(CACHED_HEADS)
        self.get = self._known.get

    def put(self, head: bytes, known: KnownHead) -> None:
        if len(head) <= LONGEST_HEAD:
            self._known.put(head, known)
