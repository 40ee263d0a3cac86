"""Runs a stream: pops, cycles and idle flushes."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from queen.streams.broker import Broker, PopRequest, Source
from queen.streams.chain import Chain
from queen.streams.cycles import Cycles, Metrics
from queen.streams.errors import StateChanged, StreamsError
from queen.streams.query import Query, register
from queen.streams.records import Batch, Message, now_ms
from queen.streams.windows import OpenPartition, OpenWindows

_EMPTY_POP_DELAY_SECONDS = 0.1
_ERROR_DELAY_SECONDS = 0.5

log = logging.getLogger("queen.streams")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `Stream.run`."""

    query_id: str
    source_queue: str
    batch_size: int = 200
    max_partitions: int = 4
    max_wait_millis: int = 1000
    subscription_mode: str | None = None
    subscription_from: str | None = None
    reset: bool = False
    consumer_group: str | None = None
    on_error: Callable[[Exception, dict[str, Any]], Awaitable[None] | None] | None = None

    @property
    def group(self) -> str:
        return self.consumer_group or f"streams.{self.query_id}"

    @property
    def pop_request(self) -> PopRequest:
        return PopRequest(
            self.group,
            self.batch_size,
            self.max_partitions,
            self.max_wait_millis,
            self.subscription_mode,
            self.subscription_from,
        )


class Runner:
    """A running stream, created by `Stream.run`: runs cycles and flushes idle windows until stopped."""

    def __init__(self, chain: Chain, broker: Broker, source: Source, options: RunOptions, *, owns_broker: bool) -> None:
        self._chain = chain
        self._broker = broker
        self._source = source
        self._options = options
        self._owns_broker = owns_broker
        self._metrics = Metrics()
        self._windows = OpenWindows()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server_query_id: str | None = None

    async def start(self) -> Runner:
        """Register the query and start. Raises `StreamsRegisterFailed`."""
        options, chain = self._options, self._chain
        try:
            known = await register(
                self._broker,
                options.query_id,
                options.source_queue,
                chain.sink_queue,
                chain.config_hash,
                reset=options.reset,
            )
        except StreamsError:
            await self._close()
            raise
        self._server_query_id = known.id
        log.info("query %s registered as %s (fresh: %s)", options.query_id, known.id, known.fresh)
        cycles = Cycles(
            chain, Query(self._broker, known.id, chain.config_hash), self._metrics, self._windows, self._report
        )
        create_task = asyncio.get_running_loop().create_task
        window = chain.window
        if window is not None and chain.reducer is not None and window.idle_flush_ms and not window.by_event_time:
            for id, name in known.partitions.items():
                self._windows.partition(id, name).unread = True
            self._tasks.append(create_task(self._flush(cycles, window.idle_flush_ms / 1000, window.grace_ms)))
        self._tasks.append(create_task(self._loop(cycles)))
        return self

    async def stop(self) -> None:
        """Wait for running cycles and stop. Idempotent."""
        self._stopping.set()
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)
        await self._close()

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and the times of the last events."""
        return {
            **self._metrics.snapshot(),
            "queryId": self._options.query_id,
            "serverQueryId": self._server_query_id,
        }

    async def _loop(self, cycles: Cycles) -> None:
        while not self._stopping.is_set():
            try:
                messages = await self._source.pop(self._options.pop_request)
            except Exception as error:
                await self._report(error, {"phase": "pop"})
                await self._sleep(_ERROR_DELAY_SECONDS)
                continue
            if not messages:
                await self._sleep(_EMPTY_POP_DELAY_SECONDS)
                continue
            # Popped messages are leased, so they are processed even if the stream is being stopped.
            await asyncio.gather(*(self._run(cycles, batch) for batch in self._batches(messages)))
            self._windows.discard_closed()

    async def _run(self, cycles: Cycles, batch: Batch) -> None:
        try:
            await cycles.run(batch)
        except StateChanged:
            # The server has released the lease: the batch is redelivered and computed from the current state.
            log.debug("partition %s: state changed by another runner", batch.partition)
        except Exception as error:
            await self._report(error, {"phase": "cycle", "partition": batch.partition_id})
            await self._sleep(_ERROR_DELAY_SECONDS)
            await self._release(batch)

    def _batches(self, messages: Sequence[Message]) -> list[Batch]:
        """Messages grouped by partition, in order."""
        by_partition: dict[str, list[Message]] = {}
        for message in messages:
            by_partition.setdefault(str(message.get("partitionId")), []).append(message)
        return [
            Batch(
                id,
                str(own[0].get("partition") or "Default"),
                str(own[0].get("leaseId") or ""),
                str(own[0].get("consumerGroup") or self._options.group),
                own,
            )
            for id, own in by_partition.items()
        ]

    async def _release(self, batch: Batch) -> None:
        """Release the lease of a failed batch for immediate redelivery."""
        first = batch.messages[0]
        acknowledgment = {
            "transactionId": first.get("transactionId"),
            "partitionId": batch.partition_id,
            "leaseId": batch.lease_id,
            "status": "retry",
        }
        body = {"acknowledgments": [acknowledgment], "consumerGroup": batch.group}
        try:
            await self._broker.post("/api/v1/ack/batch", body)
        except StreamsError as error:
            log.warning("partition %s: lease not released, redelivery after it expires: %s", batch.partition, error)

    async def _flush(self, cycles: Cycles, interval: float, grace_ms: int) -> None:
        while not self._stopping.is_set():
            await self._sleep(interval)
            for partition in self._windows.ripe(now_ms() - grace_ms):
                if self._stopping.is_set():
                    return
                await self._flush_one(cycles, partition)
            self._windows.discard_closed()
            self._metrics.mark("lastFlushAt")

    async def _flush_one(self, cycles: Cycles, partition: OpenPartition) -> None:
        try:
            await cycles.flush(partition, self._options.group)
        except StateChanged:
            # Another runner has emitted the windows; the next flush checks again.
            log.debug("partition %s: flushed by another runner", partition.name)
        except Exception as error:
            await self._report(error, {"phase": "flush", "partition": partition.id})

    async def _report(self, error: Exception, context: dict[str, Any]) -> None:
        self._metrics.failed(error)
        log.error("query %s: %s failed: %r", self._options.query_id, context["phase"], error)
        hook = self._options.on_error
        if hook is None:
            return
        try:
            result = hook(error, context)
            if inspect.isawaitable(result):
                await result
        except Exception:
            log.exception("query %s: on_error failed", self._options.query_id)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or return at once when the stream is stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _close(self) -> None:
        if self._owns_broker:
            await self._broker.close()
