"""Steady load for a long time, while a transaction stays open elsewhere in the database: does anything grow?

python bench/steady.py                       an hour, 1000 messages a second
python bench/steady.py --seconds 300 --rate 4000 --no-hold
python bench/steady.py --no-hold --rate 30000 --messages 100 --partitions 100000 --retention 60 --dedup-window 150
                                             a day in an hour: what is kept for an hour of the day, 150 seconds
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":
    # Started as a file, Python looks beside this file and not in the project: the package is one level up.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import aiohttp
import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.generator import HERE, Generator, OptionValue
from bench.plot import pyplot
from bench.postgres import Database
from bench.target import Target, fresh_server

QUEUE = "steady"
SLICE_SECONDS = 20
TABLES = ("partitions", "cursors", "segments")


class Sample(msgspec.Struct, frozen=True):
    """One slice of the run: latencies in milliseconds, sizes at its end."""

    at: float
    messages_per_s: float
    push_p50: float
    push_p99: float
    pop_p50: float
    pop_p99: float
    ack_p50: float
    ack_p99: float
    memory: int
    """Bytes of the server's processes together."""
    bytes: dict[str, int]
    """Of tables with their indexes."""
    indexes: dict[str, int]
    dead: dict[str, int]
    stored: int


def main(
    seconds: Annotated[int, typer.Option(help="Length of the run.")] = 3600,
    rate: Annotated[int, typer.Option(help="Messages pushed, popped and acknowledged a second.")] = 1000,
    messages: Annotated[int, typer.Option(help="Messages of one push.")] = 10,
    partitions: Annotated[int, typer.Option(help="Partitions they are spread over.")] = 4,
    hold: Annotated[bool, typer.Option(help="Keep a transaction open elsewhere in the database.")] = True,
    retention: Annotated[int, typer.Option(help="Remove what was consumed after so many seconds; 0: keep it.")] = 0,
    dedup_window: Annotated[int, typer.Option(help="DEDUP_WINDOW_SECONDS of the server.")] = 3600,
    workers: Annotated[int, typer.Option(help="Worker processes of the server.")] = 2,
) -> None:
    """Pushes, pops and acknowledges at a steady pace, looks at latencies, memory and table sizes every 20 seconds, and
    draws them. With --hold, a transaction with a snapshot is open from before the first message to the end."""
    samples = asyncio.run(run(seconds, rate, messages, partitions, hold, retention, dedup_window, workers))
    name = f"steady-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    target = HERE / "results" / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(msgspec.json.format(msgspec.json.encode(samples)))
    print(f"written to {target}")
    draw(samples, target.with_suffix(".png"), rate, hold)
    print(f"drawn in {target.with_suffix('.png')}")


async def run(
    seconds: int,
    rate: int,
    messages: int,
    partitions: int,
    hold: bool,
    retention: int,
    dedup_window: int,
    workers: int,
) -> list[Sample]:
    load: dict[str, OptionValue] = {"queue": QUEUE, "connections": 16, "messages": messages, "batch": 100, "warmup": 0}
    load |= {"partitions": partitions, "rate": rate}
    samples: list[Sample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    async with AsyncExitStack() as stack:
        settings = {"RETENTION_INTERVAL": "10000", "DEDUP_WINDOW_SECONDS": str(dedup_window)}
        target = await stack.enter_async_context(fresh_server(workers, settings))
        assert target.database is not None
        if retention:
            await keep_for(target, retention)
        if hold:
            await stack.enter_async_context(open_transaction(target.database))
        generator = Generator(target.host, target.port)
        progress = stack.enter_context(Progress(*columns))
        task = progress.add_task("starting", total=seconds)
        stored = 0
        for start in range(0, seconds, SLICE_SECONDS):
            length = min(SLICE_SECONDS, seconds - start)
            result = await generator.run("mixed", load | {"seconds": length, "seed": 1 + start})
            if result.errors.total:
                raise SystemExit(f"unexpected response: {result.errors.first}")
            stored += result.total_pushed
            sizes, indexes, dead = await look(target.database)
            sample = Sample(
                start + SLICE_SECONDS,
                result.messages_per_s,
                *(result.push_ms.p50, result.push_ms.p99, result.pop_ms.p50, result.pop_ms.p99),
                *(result.ack_ms.p50, result.ack_ms.p99),
                target.watched.server_memory_bytes(),
                sizes,
                indexes,
                dead,
                stored,
            )
            samples.append(sample)
            progress.update(task, completed=start + SLICE_SECONDS, description=describe(sample))
    return samples


def describe(sample: Sample) -> str:
    return (
        f"{sample.messages_per_s:,.0f} msg/s, pop p50 {sample.pop_p50:.1f} p99 {sample.pop_p99:.1f} ms,"
        f" cursors {sample.bytes['cursors'] >> 10} KB"
    )


async def keep_for(target: Target, seconds: int) -> None:
    """What every group has consumed is removed soon after."""
    options = {"retentionEnabled": True, "completedRetentionSeconds": seconds}
    url = f"http://{target.host}:{target.port}/api/v1/configure"
    body = {"queue": QUEUE, "options": options}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        answer.raise_for_status()


@asynccontextmanager
async def open_transaction(database: Database) -> AsyncIterator[None]:
    """A session that did something once and has been idle in its transaction ever since."""
    connection = await database.connect()
    try:
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.execute("SELECT pg_current_xact_id()")
        yield
    finally:
        await connection.close()


async def look(database: Database) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes of the tables with their indexes, of the indexes alone, and dead rows as PostgreSQL counts them."""
    connection = await database.connect()
    try:
        rows = await connection.fetch(
            "SELECT relname, pg_total_relation_size(relid) AS bytes, pg_indexes_size(relid) AS indexes,"
            " n_dead_tup AS dead FROM pg_stat_all_tables"
            " WHERE schemaname = 'queen' AND relname = ANY($1)",
            list(TABLES),
        )
    finally:
        await connection.close()
    bytes, indexes, dead = ({row["relname"]: row[column] for row in rows} for column in ("bytes", "indexes", "dead"))
    return bytes, indexes, dead


def draw(samples: list[Sample], picture: Path, rate: int, hold: bool) -> None:
    plots = pyplot()
    figure, (latency, sizes, stored, memory) = plots.subplots(4, 1, figsize=(11, 15), sharex=True, layout="constrained")
    minutes = [sample.at / 60 for sample in samples]
    for name, color in (("push", "#3b6ea5"), ("pop", "#c0392b"), ("ack", "#3a8f5c")):
        line(latency, minutes, [getattr(sample, f"{name}_p50") for sample in samples], f"{name} p50", color, "-")
        line(latency, minutes, [getattr(sample, f"{name}_p99") for sample in samples], f"{name} p99", color, ":")
    latency.set_title(
        f"milliseconds at up to {rate:,} messages a second" + (", one transaction open all the time" * hold)
    )
    for table, color in (("partitions", "#3b6ea5"), ("cursors", "#c0392b")):
        line(sizes, minutes, [sample.bytes[table] / 1024 for sample in samples], table, color, "-")
        line(sizes, minutes, [sample.indexes[table] / 1024 for sample in samples], f"{table}: indexes", color, ":")
    sizes.set_title("tables that change with every batch, with indexes, KB")
    line(stored, minutes, [sample.bytes["segments"] / 1e6 for sample in samples], "segments, MB", "#3b6ea5", "-")
    line(stored, minutes, [sample.indexes["segments"] / 1e6 for sample in samples], "its indexes, MB", "#3b6ea5", ":")
    line(stored, minutes, [sample.stored / 1e5 for sample in samples], "pushed so far, 100 000", "#888888", "--")
    stored.set_title("messages stored")
    line(memory, minutes, [sample.memory / (1 << 20) for sample in samples], "server, MB", "#3b6ea5", "-")
    memory.set_title("memory of the server's processes, MB")
    memory.set_xlabel("minutes")
    for axes in (latency, sizes, stored, memory):
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", fontsize=8)
    figure.savefig(picture, dpi=110)


def line(axes: Any, x: list[float], y: list[float], label: str, color: str, style: str) -> None:
    axes.plot(x, y, label=label, color=color, linestyle=style)


if __name__ == "__main__":
    typer.run(main)
