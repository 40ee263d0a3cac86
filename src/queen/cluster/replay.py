"""Packets that were sent before, or long ago, are not taken again."""

from __future__ import annotations

from collections import OrderedDict

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
            # The one that has been silent for longest: its packets are stale by now.
            self._senders.popitem(last=False)
        return True
