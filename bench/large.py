"""A server of many queues and partitions: how long each request of the dashboard's pages takes.

    python -m bench.large [--queues 10000] [--partitions 1000000] [--largest 500000] [--rounds 3] [--keep]

One queue has the `--largest` number of partitions, the others share the rest. Every partition has ten messages; a
group `readers` has a cursor on each and is behind on every tenth, a group `auditors` has read nothing of the largest
queue. The first column is the first time that something is asked after the server has counted, with nothing in the
caches of views; the second is the median of the next ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from urllib.parse import quote

import aiohttp

from bench.target import fresh_server

LARGEST = "largest"
ALLOWED_MS = 500
# Page of the dashboard, and what it asks for at once.
PAGES: dict[str, tuple[str, ...]] = {
    "shell": ("/api/v1/resources/overview", "/health", "/api/v1/events?limit=1"),
    "overview": (
        "/api/v1/status?includeQueues=false",
        "/api/v1/analytics/queue-ops?busiest=0",
        "/api/v1/analytics/retention",
        "/api/v1/consumer-groups?limit=8&sort=time&order=desc",
        "/api/v1/status/queues?sort=pending&order=desc&limit=8",
        "/metrics/prometheus",
    ),
    "queues": (
        "/api/v1/resources/queues?sort=pending&order=desc&limit=50&offset=0",
        "/api/v1/resources/queues?sort=name&order=asc&limit=50&offset=9000",
        "/api/v1/resources/queues?search=arge&sort=created&order=desc&limit=50&offset=0",
        "/api/v1/resources/namespaces",
        "/api/v1/resources/tasks",
    ),
    "queue": (
        f"/api/v1/status/queues/{LARGEST}?includePartitions=false",
        f"/api/v1/analytics/queue-ops?queue={LARGEST}",
        f"/api/v1/consumer-groups?queue={LARGEST}&limit=1000",
    ),
    "queue, partitions": (
        f"/api/v1/resources/partitions?queue={LARGEST}&sort=name&order=asc&limit=50&offset=0",
        f"/api/v1/resources/partitions?queue={LARGEST}&sort=name&order=asc&limit=50&offset=100000",
        f"/api/v1/resources/partitions?queue={LARGEST}&search=12345&sort=name&order=asc&limit=50&offset=0",
    ),
    "groups": (
        "/api/v1/consumer-groups?sort=time&order=desc&limit=50&offset=0",
        "/api/v1/consumer-groups/lagging?minLagSeconds=60&limit=100",
    ),
    "group": (
        "/api/v1/consumer-groups?search=readers&limit=1000",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/partitions?sort=name&limit=50",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/partitions?sort=name&limit=50&offset=100000",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/partitions?sort=name&limit=50&search=12345",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/partitions?sort=behind&order=desc&limit=50",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/partitions?sort=behind&order=desc&limit=50&offset=50",
    ),
    "seek, preview": (
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/seek/preview?toBeginning=true&within=150",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/seek/preview?toEnd=true&within=150",
        f"/api/v1/consumer-groups/readers/queues/{LARGEST}/seek/preview?timestamp={{hour_ago}}&within=150",
    ),
    "messages": (
        "/api/v1/messages?count=false&limit=100",
        f"/api/v1/messages?queue={LARGEST}&count=false&limit=100",
        f"/api/v1/messages?queue={LARGEST}&partition=p-00012345&limit=100",
        "/api/v1/resources/queues?search=q&sort=name&order=asc&limit=50",
    ),
    "dead letters": (
        "/api/v1/dlq?limit=50",
        f"/api/v1/dlq?queue={LARGEST}&limit=50",
        f"/api/v1/status?queue={LARGEST}",
        "/api/v1/dlq/report?limit=200",
    ),
    "traces": ("/api/v1/traces/names?limit=100",),
    "operations": (
        "/api/v1/analytics/worker-metrics",
        "/api/v1/analytics/queue-lag",
        "/api/v1/analytics/queue-parked-replicas",
    ),
    "analytics": ("/api/v1/status/queues?sort=stored&order=desc&limit=12",),
    "system": (
        "/api/v1/analytics/system-metrics",
        "/api/v1/analytics/postgres-stats",
        "/api/v1/system/connections",
    ),
    "the rest": (
        "/api/v1/topics/namespaces",
        "/api/v1/streams",
        "/api/v1/pipelines",
        "/api/v1/shards",
        "/api/v1/system/settings",
        "/api/v1/audit?limit=100",
    ),
}
COUNTED = (
    "/api/v1/resources/overview",
    "/api/v1/consumer-groups",
    "/api/v1/consumer-groups/lagging?minLagSeconds=60&limit=100",
)
FILL = (
    "INSERT INTO queen.queues (name, namespace, task) SELECT 'q-' || lpad(n::text, 5, '0'), 'space-' || n % 20,"
    " 'task-' || n % 7 FROM generate_series(2, {queues}) n",
    "INSERT INTO queen.queues (name, namespace) VALUES ('" + LARGEST + "', 'space-0')",
    "INSERT INTO queen.groups (name) VALUES ('readers'), ('auditors')",
    "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at, created_at)"
    " SELECT q.id, 'p-' || lpad(n::text, 8, '0'), 10, now() - interval '2 minutes', now() - interval '1 day'"
    " FROM generate_series(1, {largest}) n, queen.queues q WHERE q.name = '" + LARGEST + "'",
    "INSERT INTO queen.partitions (queue_id, name, next_offset, last_at, created_at)"
    " SELECT q.id, 'p-' || lpad(n::text, 8, '0'), 10, now() - interval '2 minutes', now() - interval '1 day'"
    " FROM queen.queues q, generate_series(1, {each}) n WHERE q.name <> '" + LARGEST + "'",
    # Of two segments each: one of two hours ago, one of two minutes ago.
    "INSERT INTO queen.segments (partition_id, base_offset, count, created_at, ids, body)"
    " SELECT p.id, 5 * k, 5, now() - make_interval(mins => 122 - 120 * k), decode(repeat('00', 56), 'hex'), '\\x00'"
    " FROM queen.partitions p, generate_series(0, 1) k",
    "INSERT INTO queen.cursors (partition_id, group_id, committed, total_consumed, total_batches, last_consumed_at)"
    " SELECT p.id, g.id, CASE WHEN p.id % 10 = 0 THEN 5 ELSE 10 END, 10, 2, now()"
    " FROM queen.partitions p, queen.groups g WHERE g.name = 'readers'",
    "INSERT INTO queen.cursors (partition_id, group_id, committed) SELECT p.id, g.id, 0 FROM queen.partitions p"
    " JOIN queen.queues q ON q.id = p.queue_id, queen.groups g WHERE g.name = 'auditors' AND q.name = '"
    + LARGEST
    + "'",
    "VACUUM ANALYZE",
)


async def ask(session: aiohttp.ClientSession, url: str) -> tuple[float, int]:
    """Milliseconds and bytes of one answer."""
    begun = time.perf_counter()
    async with session.get(url) as answer:
        body = await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url}: {answer.status} {body[:300].decode()}")
    return (time.perf_counter() - begun) * 1000, len(body)


async def measure(arguments: argparse.Namespace) -> None:
    async with fresh_server(arguments.workers) as target:
        assert target.database is not None
        connection = await target.database.connect()
        each = (arguments.partitions - arguments.largest) // (arguments.queues - 1)
        for statement in FILL:
            begun = time.perf_counter()
            await connection.execute(
                statement.format(queues=arguments.queues, largest=arguments.largest, each=each), timeout=3600
            )
            print(f"{time.perf_counter() - begun:7.1f} s  {statement[:90]}")
        await connection.close()
        base = f"http://{target.host}:{target.port}"
        if arguments.keep:
            print(f"{base}  {target.database}  Ctrl-C ends it", flush=True)
            await asyncio.Event().wait()
        hour_ago = quote(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600)))
        timeout = aiohttp.ClientTimeout(total=120)
        # What is counted in the background from the start on is waited for: it is what a server has that runs.
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for path in itertools.islice(itertools.cycle(COUNTED), 4 * len(COUNTED)):
                await ask(session, base + path)
            print(f"{'':20}{'first':>8}{'then':>8} ms {'bytes':>9}")
            slow = 0
            for page, paths in PAGES.items():
                for path in paths:
                    url = base + path.replace("{hour_ago}", hour_ago)
                    found = [await ask(session, url) for _ in range(arguments.rounds + 1)]
                    first, then = found[0][0], statistics.median(took for took, _ in found[1:])
                    slow += first > ALLOWED_MS
                    mark = "  slow" if first > ALLOWED_MS else ""
                    print(f"{page:20}{first:>8.0f}{then:>8.0f}    {found[0][1]:>9}  {path}{mark}")
            print(f"{slow} of {sum(map(len, PAGES.values()))} took more than {ALLOWED_MS} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--partitions", type=int, default=1_000_000, help="of all queues together")
    parser.add_argument("--largest", type=int, default=500_000, help="partitions of the largest queue")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is asked after the first time")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the server")
    parser.add_argument("--keep", action="store_true", help="fill the database and serve it until Ctrl-C")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
