"""Where packets come in: what is damaged, forged, old or repeated is refused."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from queen.cluster.packet import Packet, decode_packet
from queen.cluster.replay import ReplayGuard
from queen.cluster.seal import Refusal, Refused, Sealer

FRESH_SECONDS = 30.0
LARGEST_FRAME = 60_000
"""What a datagram of the local bus holds, by which it is passed on."""


class Gate:
    """Turns frames into packets. Age and repetition matter only with a secret: without one, anybody makes new ones."""

    def __init__(self, sealer: Sealer, clock: Callable[[], float] = time.time) -> None:
        self._sealer = sealer
        self._guard = ReplayGuard()
        self._clock = clock

    def admit(self, frame: bytes) -> tuple[Packet, bytes]:
        """The packet and its bare body; raises `Refused`."""
        if len(frame) > LARGEST_FRAME:
            raise Refused(Refusal.MALFORMED)
        body = self._sealer.open(frame)
        packet = decode(body)
        if self._sealer.signs:
            if abs(self._clock() - packet.sent_ms / 1000) > FRESH_SECONDS:
                raise Refused(Refusal.STALE)
            if not self._guard.admit(packet.sender, packet.sequence):
                raise Refused(Refusal.REPLAYED)
        return packet, body

    def note(self, packet: Packet) -> None:
        """Another worker of this host has admitted the packet: it must not come in here once more."""
        if self._sealer.signs:
            self._guard.admit(packet.sender, packet.sequence)


def decode(body: bytes) -> Packet:
    """A packet from its body; raises `Refused`."""
    try:
        return decode_packet(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Refusal.MALFORMED) from error
