"""Makes the packets that a worker sends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from msgspec import Raw

from queen.cluster.identity import draw_number
from queen.cluster.packet import Event, Heartbeat, encode_events, encode_packet
from queen.cluster.seal import Sealer


class PacketWriter:
    """Numbers packets one after the other, and seals them."""

    def __init__(self, boot: int, sealer: Sealer) -> None:
        self._boot = boot
        self._sealer = sealer
        self._sender = draw_number()
        self._sequence = 0

    def events(self, events: Iterable[Event], room: int) -> Iterator[tuple[bytes, int]]:
        """Frames of at most `room` bytes (unless one event needs more), each with the number of events in it."""
        for some in encode_events(events, room):
            yield self._seal(some, None), len(some)

    def heartbeat(self, heartbeat: Heartbeat) -> bytes:
        return self._seal([], heartbeat)

    def _seal(self, events: list[Raw], heartbeat: Heartbeat | None) -> bytes:
        self._sequence += 1
        sent_ms = int(time.time() * 1000)
        return self._sealer.seal(encode_packet(self._boot, self._sender, self._sequence, sent_ms, events, heartbeat))
