"""Several shards, one tie to other hosts: events of every shard but the first say which one they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from queen.cluster.packet import Event
from queen.cluster.peers import Peers
from queen.settings import Settings

# Names hold no control characters, so no name begins with this.
_MARK: Final = "\x01"


class ShardPeers(Peers):
    """Tells other hosts of one shard over the ties of another's broker, which also hears for all."""

    def __init__(self, settings: Settings, runtime_dir: Path, ties: Peers, shard: int) -> None:
        alone = dataclasses.replace(settings, queen_sync_enabled=False)
        super().__init__(alone, runtime_dir, relay=lambda frame: None, deliver=lambda events: None)
        self._ties = ties
        self._shard = shard
        self.active = ties.active

    def start(self) -> None:
        return

    def tell(self, events: Sequence[Event]) -> None:
        self._ties.tell([(*event[:5], f"{_MARK}{self._shard}{_MARK}{event[5]}") for event in events])


def by_shard(events: Sequence[Event]) -> dict[int, list[Event]]:
    """Events as their shards know them."""
    found: dict[int, list[Event]] = {}
    for event in events:
        shard = 0
        if event[5].startswith(_MARK):
            number, _, name = event[5][1:].partition(_MARK)
            if not (number.isascii() and number.isdigit()):
                continue
            shard, event = int(number), (*event[:5], name)
        found.setdefault(shard, []).append(event)
    return found
