"""Where queues end while a pipeline reads them: an idle query, or one at a long batch, does not say."""

from __future__ import annotations

import logging
import time
from typing import Final

from queen.errors import QueenError
from queen.pipelines.connection import Connection
from queen.pipelines.declaration import Declaration, SourceKind
from queen.spark.log import Position
from queen.spark.shards import ShardLog

log = logging.getLogger(__name__)

_SECONDS: Final = 5.0


class QueueEnds:
    """Looked up every few seconds at most, from PostgreSQL; nothing where it is not known."""

    def __init__(self, declaration: Declaration, connection: Connection) -> None:
        named = [source.target.split(",") for source in declaration.sources if source.kind is SourceKind.QUEUE]
        self._queues = sorted({name.strip() for names in named for name in names})
        self._log = ShardLog(connection.databases) if connection.databases and self._queues else None
        self._next = 0.0

    def look(self) -> list[Position] | None:
        """None when it is not time yet, or when they cannot be had."""
        if self._log is None or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + _SECONDS
        try:
            return self._log.positions(self._queues)
        except QueenError as error:
            # The queries that read them say what is wrong, if anything is.
            log.debug("lags are not known: %s", error)
            return None
