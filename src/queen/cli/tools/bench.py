"""`queen bench`: throughput and latency of pushes and pops, measured from this machine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from queen.cli.common.exits import ServerFailed
from queen.cli.common.output import Column, Progress
from queen.cli.common.session import Session
from queen.cli.common.tree import command, group
from queen.wire.paths import path_of

if TYPE_CHECKING:
    from queen.client.client import Queen

app = group("Measure throughput and latency of pushes and pops.")

_GROUP: Final = "queenctl-bench"
_QUANTILES: Final = (50, 90, 95, 99)
_IDLE_SECONDS: Final = 10.0
_COLUMNS = (
    Column("PHASE", "phase"),
    Column("MESSAGES", "messages", right=True),
    Column("SECONDS", lambda row: f"{row['seconds']:.2f}", right=True),
    Column("MSG/S", lambda row: f"{row['perSecond']:.0f}", right=True),
    Column("MB/S", lambda row: f"{row['megabytesPerSecond']:.2f}", right=True),
    *(Column(f"P{q}", lambda row, q=q: f"{row['latencyMs'][f'p{q}']:.1f}ms", right=True) for q in _QUANTILES),  # type: ignore[misc]
    Column("MAX", lambda row: f"{row['latencyMs']['max']:.1f}ms", right=True),
)


@command(
    app,
    "bench",
    example="""
queen bench
queen bench --total 100000 --batch 500 --producers 8 --consumers 8 --payload-size 256
queen bench --skip-pop -o json
""",
)
def bench(
    ctx: typer.Context,
    queue: Annotated[str, typer.Option("--queue", help="The queue to use.")] = "queenctl-bench",
    total: Annotated[int, typer.Option("--total", min=1, help="Messages.")] = 10_000,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Messages of one request.")] = 100,
    partitions: Annotated[int, typer.Option("--partitions", min=1, help="Partitions to spread them over.")] = 4,
    producers: Annotated[int, typer.Option("--producers", min=1, max=1000, help="Requests at the same time.")] = 4,
    consumers: Annotated[int, typer.Option("--consumers", min=1, max=1000, help="Requests at the same time.")] = 4,
    payload_size: Annotated[
        int, typer.Option("--payload-size", min=0, max=10_000_000, help="Bytes of text in each message.")
    ] = 64,
    skip_pop: Annotated[bool, typer.Option("--skip-pop", help="Only push.")] = False,
    auto_create: Annotated[bool, typer.Option("--auto-create/--no-auto-create", help="Create the queue first.")] = True,
    auto_delete: Annotated[bool, typer.Option("--auto-delete/--keep", help="Delete the queue afterwards.")] = False,
) -> None:
    """Measure throughput and latency of pushes and pops.

    PUSH and POP have the time of each request, RESIDENCY the time that messages were in the queue.
    """
    session = Session.of(ctx)
    run = _Run(session, queue, total, batch, partitions, payload_size)
    rows = asyncio.run(run.measure(producers, 0 if skip_pop else consumers, auto_create, auto_delete))
    session.out.rows(rows, _COLUMNS)


class _Run:
    """One measurement."""

    def __init__(self, session: Session, queue: str, total: int, batch: int, partitions: int, size: int) -> None:
        self._session = session
        self._queue = queue
        self._total = total
        self._batch = batch
        self._partitions = partitions
        self._size = size
        self._run = uuid.uuid4().hex[:12]
        self._left = total
        self._popped = 0
        self._progressed = 0.0

    async def measure(self, producers: int, consumers: int, create: bool, delete: bool) -> list[dict[str, Any]]:
        from queen.client.client import Queen

        server = self._session.server
        options: dict[str, Any] = {
            "bearer_token": server.token,
            "insecure": server.insecure,
            "strict": True,
            "handle_signals": False,
        }
        async with Queen(server.url, retry_attempts=2, **options) as queen:
            if create:
                await queen.request("POST", "/api/v1/configure", {"queue": self._queue, "options": {}})
            # What an earlier run has left is not ours to count.
            await self._skip(queen)
            try:
                rows = [await self._phase(queen, "PUSH", producers, self._produce)]
                if consumers:
                    rows += await self._consume_all(queen, consumers)
            finally:
                if delete:
                    await queen.request("DELETE", path_of("/api/v1/resources/queues", self._queue))
        return rows

    async def _skip(self, queen: Queen) -> None:
        """Have the group of the benchmark begin at the end."""
        path = f"{path_of('/api/v1/pop/queue', self._queue)}?consumerGroup={_GROUP}&subscriptionMode=new"
        await queen.request("GET", f"{path}&batch=1&autoAck=true")
        seek = path_of("/api/v1/consumer-groups", _GROUP, "queues", self._queue, "seek")
        await queen.request("POST", seek, {"toEnd": True})

    async def _phase(
        self, queen: Queen, name: str, workers: int, work: Callable[..., Awaitable[None]], *more: Any
    ) -> dict[str, Any]:
        latencies: list[float] = []
        began = self._progressed = time.perf_counter()
        with self._session.out.progress(name, self._total) as bar:
            await asyncio.gather(*(work(queen, latencies, bar, number, *more) for number in range(workers)))
        # Consumers that find no more messages end later; their waiting is not part of the measurement.
        messages = self._popped if name == "POP" else self._total
        return self._row(name, messages, self._progressed - began, latencies)

    async def _produce(self, queen: Queen, latencies: list[float], bar: Progress, number: int) -> None:
        text = "x" * self._size
        while self._left > 0:
            count = min(self._batch, self._left)
            self._left -= count
            partition = f"p{(self._left // self._batch) % self._partitions}"
            items = [
                {"queue": self._queue, "partition": partition, "payload": {"run": self._run, "text": text}}
                for _ in range(count)
            ]
            began = time.perf_counter()
            results = await queen.request("POST", "/api/v1/push", {"items": items})
            self._progressed = time.perf_counter()
            latencies.append(self._progressed - began)
            refused = [result for result in results if result["status"] == "failed"]
            if refused:
                raise ServerFailed(f"{len(refused)} messages were refused: {refused[0].get('error')}")
            bar.advance(count)

    async def _consume_all(self, queen: Queen, consumers: int) -> list[dict[str, Any]]:
        residency: list[float] = []
        row = await self._phase(queen, "POP", consumers, self._consume, residency)
        return [row, self._row("RESIDENCY", self._popped, row["seconds"], residency)]

    async def _consume(
        self, queen: Queen, latencies: list[float], bar: Progress, number: int, residency: list[float]
    ) -> None:
        path = (
            f"{path_of('/api/v1/pop/queue', self._queue)}?consumerGroup={_GROUP}&autoAck=true"
            f"&batch={self._batch}&partitions={self._partitions}&wait=true&timeout=500"
        )
        last = time.monotonic()
        while self._popped < self._total and time.monotonic() - last < _IDLE_SECONDS:
            began = time.perf_counter()
            answer = await queen.request("GET", path) or {}
            messages = answer.get("messages", [])
            if not messages:
                continue
            self._progressed = time.perf_counter()
            latencies.append(self._progressed - began)
            now = datetime.now(UTC)
            last = time.monotonic()
            self._popped += len(messages)
            residency += [(now - datetime.fromisoformat(one["createdAt"])).total_seconds() for one in messages]
            bar.advance(len(messages))

    def _row(self, phase: str, messages: int, seconds: float, latencies: Sequence[float]) -> dict[str, Any]:
        ordered = sorted(latencies) or [0.0]
        quantiles = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1000 for q in _QUANTILES}
        per_second = messages / seconds if seconds else 0.0
        return {
            "phase": phase,
            "messages": messages,
            "seconds": seconds,
            "perSecond": per_second,
            "megabytesPerSecond": per_second * self._size / 1e6,
            "latencyMs": {**quantiles, "max": ordered[-1] * 1000},
        }
