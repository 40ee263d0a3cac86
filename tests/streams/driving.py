"""Batches driven through a stream by hand, cycle by cycle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from queen.streams import Stream
from queen.streams.chain import compile_chain
from queen.streams.cycles import Cycles, Metrics
from queen.streams.query import Query
from queen.streams.records import Batch, to_iso
from queen.streams.windows import OpenWindows
from tests.streams.memory_broker import MemoryBroker

PARTITION = "p-1"


class Driven:
    """A stream whose batches a test chooses."""

    def __init__(self, stream: Stream, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self.metrics = Metrics()
        self.windows = OpenWindows()
        self.errors: list[Exception] = []
        self._messages = 0
        chain = compile_chain(stream._operators)
        query = Query(self.broker, "q", chain.config_hash)
        self.cycles = Cycles(chain, query, self.metrics, self.windows, self._report)

    async def run(self, payloads: Sequence[Any], *, created_ms: Sequence[int] | int = 0) -> None:
        """One cycle over messages with these payloads."""
        times = [created_ms] * len(payloads) if isinstance(created_ms, int) else created_ms
        messages = [
            {
                "transactionId": f"t-{self._messages + index}",
                "partitionId": PARTITION,
                "partition": "Default",
                "createdAt": to_iso(ms),
                "data": payload,
            }
            for index, (payload, ms) in enumerate(zip(payloads, times, strict=True))
        ]
        self._messages += len(messages)
        await self.cycles.run(Batch(PARTITION, "Default", "lease", "g", messages))

    async def flush(self) -> None:
        await self.cycles.flush(self.windows.partition(PARTITION, "Default"), "g")

    @property
    def emitted(self) -> list[Any]:
        return [item["payload"] for item in self.broker.pushed]

    async def _report(self, error: Exception, context: dict[str, Any]) -> None:
        self.errors.append(error)
