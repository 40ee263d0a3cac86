"""Transaction ids for messages that come without one."""

from __future__ import annotations

import os

from queen.wire.ids import IdSource

# A fresh block now and then keeps the time in the ids close to the time of the push.
_IDS_OF_A_BLOCK = 1024


class TransactionIds:
    """Makes ids nobody else makes, in ascending order: a block of UUIDs at a time, counted through."""

    __slots__ = ("_left", "_low", "_pid", "_prefix", "_source")

    def __init__(self) -> None:
        self._pid = 0
        self._left = 0
        self._low = 0
        self._prefix = ""
        self._source = IdSource()

    def next(self) -> str:
        # A process that was forked must not go on where its parent went on, too.
        if not self._left or self._pid != os.getpid():
            self._renew()
        self._left -= 1
        self._low += 1
        return f"{self._prefix}{self._low:012x}"

    def _renew(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._source = IdSource()
        block = self._source.block(_IDS_OF_A_BLOCK)
        self._prefix, self._low, self._left = block.prefix.decode(), block.low - 1, _IDS_OF_A_BLOCK
