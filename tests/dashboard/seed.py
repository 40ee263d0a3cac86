"""A shop's worth of queues, groups, dead letters, traces, topics, streams and pipelines, for tests and screenshots.

`seed` goes through the HTTP API alone. `add_history` writes a day of figures, and the age of messages, straight into
the database: nobody waits a day for a screenshot.
"""

from __future__ import annotations

import asyncio
import math
import random
import socket
import time
import uuid
from base64 import b64encode
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import asyncpg
import msgspec

from queen.wire.api.resources.tasks import (
    APPLICATION_KEY,
    WORKER_PREFIX,
    FailedAttempt,
    RunningJob,
    TaskApplication,
    TaskDeclaration,
    TaskSchedule,
    TaskWork,
    WorkerReport,
)
from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus, write_status

CITIES: Final = ("Turin", "Lisbon", "Ghent", "Oslo", "Porto", "Graz", "Lyon", "Bergen")
ERRORS: Final = (
    "card_declined: the issuer refused the payment",
    "TimeoutError: payment gateway did not answer within 10 s",
    "ValueError: currency 'XBT' is not supported",
    "SMTP 550: mailbox unavailable",
)

# name, namespace, task, partitions, messages, {group: share that it consumes}, push/s, lag in seconds
Queue = tuple[str, str, str, int, int, dict[str, float], float, int]
QUEUES: Final[Sequence[Queue]] = (
    ("orders", "shop", "checkout", 24, 1200, {"billing": 0.96, "fulfilment": 0.82, "analytics": 0.4}, 420, 40),
    ("payments", "shop", "checkout", 12, 600, {"ledger": 1.0, "fraud-check": 0.9}, 260, 12),
    ("emails", "shop", "notify", 4, 300, {"mailer": 0.7}, 85, 190),
    ("shipments", "shop", "logistics", 8, 240, {"carriers": 0.95}, 40, 25),
    ("invoices", "finance", "documents", 6, 180, {"pdf": 1.0}, 22, 0),
    ("search-index", "platform", "indexing", 16, 480, {"indexer": 0.55}, 150, 740),
    ("audit-log", "platform", "compliance", 2, 400, {"archive": 1.0}, 310, 0),
    ("image-resize", "media", "thumbnails", 10, 220, {"resizer": 0.88}, 64, 8),
    ("webhooks", "platform", "notify", 5, 160, {"dispatcher": 0.6}, 48, 95),
    ("order-totals", "shop", "analytics", 1, 40, {"dashboard": 1.0}, 2, 0),
)
BEHIND: Final = 90
"""Queues that are further behind than this stay so."""
PACE: Final = 3.0
"""Of the figures of a day, each minute at each worker."""
TRACED: Final = ("order-4711", "order-4712", "refund-88", "import-2026-11")


class Seeder:
    """Calls of the API; any failure is an error."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(self, method: str, path: str, body: object = None) -> Any:
        async with self._session.request(method, self._url + path, json=body) as response:
            assert response.status < 300, f"{method} {path}: {response.status} {await response.text()}"
            return await response.json(content_type=None)

    async def queue(self, queue: Queue, chance: random.Random) -> None:
        name, namespace, task, partitions, messages, groups, *_ = queue
        options = {"leaseTime": 60, "retryLimit": 3, "deadLetterQueue": True, "dlqAfterMaxRetries": True}
        await self.call(
            "POST", "/api/v1/configure", {"queue": name, "namespace": namespace, "task": task, "options": options}
        )
        for group in groups:
            await self.call("GET", f"/api/v1/pop/queue/{name}?consumerGroup={group}&subscriptionMode=all")
        items = [
            {
                "queue": name,
                "partition": f"customer-{1 + number % partitions}" if partitions > 1 else "Default",
                "payload": _payload(name, number, chance),
                "transactionId": f"{name}-{10_000 + number}",
                "traceId": str(uuid.UUID(int=chance.getrandbits(128), version=4)),
            }
            for number in range(messages)
        ]
        for start in range(0, len(items), 200):
            await self.call("POST", "/api/v1/push", {"items": items[start : start + 200]})
        for group, share in groups.items():
            await self.consume(name, group, int(messages * share))

    async def consume(self, queue: str, group: str, messages: int) -> None:
        """Pop and acknowledge about so many messages for a group."""
        while messages > 0:
            path = f"/api/v1/pop/queue/{queue}?consumerGroup={group}&batch={min(100, messages)}&subscriptionMode=all"
            popped = (await self.call("GET", path) or {}).get("messages", [])
            if not popped:
                return
            await self.ack(group, popped, "completed")
            messages -= len(popped)

    async def ack(self, group: str, messages: Sequence[dict[str, Any]], status: str, error: str = "") -> None:
        acks = [
            {key: one[key] for key in ("transactionId", "partitionId", "leaseId")} | {"status": status, "error": error}
            for one in messages
        ]
        await self.call("POST", "/api/v1/ack/batch", {"consumerGroup": group, "acknowledgments": acks})

    async def dead_letters(self, queue: str, group: str, count: int, errors: Sequence[str]) -> None:
        for number in range(count):
            path = f"/api/v1/pop/queue/{queue}?consumerGroup={group}&batch=1&subscriptionMode=all"
            popped = (await self.call("GET", path) or {}).get("messages", [])
            if not popped:
                return
            await self.ack(group, popped, "dlq", errors[number % len(errors)])

    async def traces(self) -> None:
        steps = (
            ("info", {"text": "order received", "channel": "web"}),
            ("processing", {"text": "checking stock", "warehouse": "Ghent"}),
            ("step", {"text": "stock reserved", "items": 3}),
            ("processing", {"text": "charging the card", "provider": "stripe", "amount": 129.9}),
            ("warning", {"text": "gateway was slow", "milliseconds": 2210}),
            ("step", {"text": "card charged", "reference": "ch_3PqX"}),
            ("error", {"text": "label printer is out of paper", "printer": "dock-4"}),
            ("step", {"text": "handed to the carrier", "carrier": "bpost"}),
        )
        path = "/api/v1/messages?queue=orders&limit=4&from=2020-01-01T00:00:00Z"
        listed = (await self.call("GET", path))["messages"]
        for position, name in enumerate(TRACED):
            for number, (kind, data) in enumerate(steps[: 8 - position]):
                message = listed[(position + number // 3) % len(listed)]
                await self.call(
                    "POST",
                    "/api/v1/traces",
                    {
                        "transactionId": message["transactionId"],
                        "partitionId": message["partitionId"],
                        "data": data,
                        "eventType": kind,
                        "traceNames": [name],
                        "consumerGroup": "fulfilment",
                    },
                )

    async def topics(self, chance: random.Random) -> None:
        for namespace, topic, ready, delayed in (
            ("acme", "thumbnails", 120, 14),
            ("acme", "reports", 30, 40),
            ("acme", "video-transcode", 8, 0),
            ("globex", "imports", 60, 5),
            ("globex", "notifications", 200, 30),
        ):
            items = [
                {
                    "namespace": namespace,
                    "topic": topic,
                    "data": {"job": number, "customer": chance.choice(CITIES)},
                    "priority": number % 4,
                    "delay": 3600 if number >= ready else 0,
                    "idempotency_key": f"{topic}-{number}",
                }
                for number in range(ready + delayed)
            ]
            await self.call("POST", "/api/v1/topics/enqueue", items)
        for _ in range(3):
            taken = await self.call("GET", "/api/v1/topics/dequeue?namespace=acme&topic=thumbnails&limit=5&lease=600")
            for item in taken[:2]:
                ref = {key: item[key] for key in ("id", "namespace", "topic")}
                await self.call("POST", "/api/v1/topics/ack", ref)
        await self.call(
            "POST",
            "/api/v1/topics/configure",
            {"namespace": "acme", "topic": "video-transcode", "options": {"max_retries": 0}},
        )
        for item in await self.call("GET", "/api/v1/topics/dequeue?namespace=acme&topic=video-transcode&limit=3"):
            ref = {key: item[key] for key in ("id", "namespace", "topic")}
            await self.call("POST", "/api/v1/topics/nack", ref | {"error": "ffmpeg exited with status 1"})
        await self.call("PUT", "/api/v1/topics/quotas", {"namespace": "acme", "per_minute": 6000})
        await self.call("PUT", "/api/v1/topics/modes", {"namespace": "globex", "mode": "buffered"})

    async def tasks(self) -> None:
        """An application of queen.tasks with one worker, as it reports itself, and jobs in every state."""
        names = {"mail/send_receipt": "send_receipt", "reports/build_report": "build_report"}
        for topic, task in names.items():
            place = {"namespace": "backoffice", "topic": topic}
            await self.call("POST", "/api/v1/topics/configure", place | {"options": {"max_retries": 0}})
            items = [
                {
                    **place,
                    "data": {"job": f"{task}-{number}", "task": task, "args": [f"customer-{number}@example.com"]},
                    "delay": 3600 if number >= 9 else 0,
                }
                for number in range(12)
            ]
            await self.call("POST", "/api/v1/topics/enqueue", items)
        for item in await self.call(
            "GET", "/api/v1/topics/dequeue?namespace=backoffice&topic=mail/send_receipt&limit=2"
        ):
            ref = {key: item[key] for key in ("id", "namespace", "topic")}
            await self.call("POST", "/api/v1/topics/nack", ref | {"error": "SMTPServerDisconnected: connection lost"})
        now = datetime.now(UTC)
        application = TaskApplication(
            [
                TaskDeclaration("send_receipt", "mail", "mail/send_receipt", 5, 30.0),
                TaskDeclaration("build_report", "reports", "reports/build_report", 2),
            ],
            [TaskSchedule("build_report", "0 6 * * 1-5", "Europe/Berlin")],
        )
        worker = WorkerReport(
            "worker-1.example",
            4242,
            ["mail", "reports"],
            10,
            now - timedelta(hours=3),
            [
                TaskWork("send_receipt", 2, 1840, 6, 312.8, 41.0, 0.2),
                TaskWork("build_report", 1, 12, 0, 544.0, 0.1, 0.0),
            ],
            [RunningJob("build_report-77", "build_report", 1, now - timedelta(seconds=48))],
            [
                FailedAttempt(
                    "send_receipt-1",
                    "send_receipt",
                    1,
                    "TimeoutError: SMTP did not answer",
                    now - timedelta(minutes=2),
                    False,
                )
            ],
        )
        values = {APPLICATION_KEY: application, f"{WORKER_PREFIX}1": worker}
        puts = [
            {"op": "put", "ns": "backoffice", "key": key, "value": msgspec.to_builtins(value), "ttlSeconds": 86_400}
            for key, value in values.items()
        ]
        await self.call("POST", "/api/v1/kv", {"operations": puts})

    async def state(self) -> None:
        """Keys, locks, timers and ephemeral queues, as the services of a shop keep them."""
        keys: list[dict[str, Any]] = [
            {"ns": "orders", "key": f"order-{4700 + number}", "value": value, "ttlSeconds": 3600 * (number + 1)}
            for number, value in enumerate(
                {"state": state, "city": CITIES[number % len(CITIES)], "total": 19.9 + 7 * number}
                for number, state in enumerate(("held", "packed", "shipped", "delivered") * 6)
            )
        ]
        keys += [{"ns": "orders", "key": "held", "value": 6, "forever": True}]
        keys += [
            {"ns": "payments", "key": f"seen-ch_3PqX{number}", "value": True, "forever": True} for number in range(9)
        ]
        keys += [
            {"ns": "emails", "key": "template-welcome", "value": {"html": "<p>Welcome</p>" * 200}, "forever": True}
        ]
        await self.call("POST", "/api/v1/kv", {"operations": [{"op": "put"} | one for one in keys]})
        for name, owner, limit in (
            ("daily-report", "reports-1.example", 1),
            ("card-gateway", "billing-1.example", 3),
            ("card-gateway", "billing-2.example", 3),
            ("search-reindex", "indexer-4.example", 1),
        ):
            acquire = {"op": "acquire", "name": name, "owner": owner, "ttlSeconds": 7200, "limit": limit}
            await self.call("POST", "/api/v1/locks", {"operations": [acquire]})
        timers = [
            {
                "op": "schedule",
                "queue": queue,
                "timerKey": key,
                "payload": b64encode(msgspec.json.encode(payload)).decode(),
                "delayMs": minutes * 60_000,
            }
            for queue, key, payload, minutes in (
                ("emails", "remind-order-4712", {"order": 4712, "template": "pay-soon"}, 45),
                ("orders", "expire-order-4704", {"order": 4704, "event": "expired"}, 20),
                ("emails", "survey-order-4703", {"order": 4703, "template": "survey"}, 2880),
                ("webhooks", "retry-wh-88", {"hook": 88, "attempt": 3}, 95),
            )
        ]
        await self.call("POST", "/api/v1/timers", {"operations": timers})
        options = {"maxLength": 500, "policy": "dropOldest", "ttlSeconds": 1800}
        await self.call("POST", "/api/v1/ephemeral/configure", {"queue": "presence", "options": options})
        for queue, partition, count in (
            ("presence", "room-7", 260),
            ("presence", "room-9", 120),
            ("uploads", "Default", 34),
        ):
            messages = [{"payload": {"user": f"user-{number}", "percent": number % 100}} for number in range(count)]
            body = {"queue": queue, "partition": partition, "messages": messages}
            await self.call("POST", "/api/v1/ephemeral/push", body)
        await self.call("GET", "/api/v1/ephemeral/pop?queue=presence&group=screen&batch=12")

    async def stream(self) -> None:
        query = await self.call(
            "POST",
            "/streams/v1/queries",
            {
                "name": "totals-per-minute",
                "source_queue": "orders",
                "sink_queue": "order-totals",
                "config_hash": "9f2c81aa",
            },
        )
        listed = await self.call("GET", "/api/v1/resources/partitions?queue=orders&limit=6")
        for place in listed["partitions"]:
            await self.call(
                "POST",
                "/streams/v1/cycle",
                {
                    "query_id": query["query_id"],
                    "partition_id": place["id"],
                    "state_ops": [
                        {"type": "upsert", "key": f"w:{place['name']}", "value": {"count": 12, "sum": 1840.5}},
                    ],
                },
            )


async def seed(url: str) -> None:
    """Fill an empty server. The same every time."""
    async with aiohttp.ClientSession() as session:
        seeder = Seeder(session, url)
        queues = (seeder.queue(queue, random.Random(queue[0])) for queue in QUEUES)
        await asyncio.gather(*queues, seeder.topics(random.Random(7)), seeder.tasks(), seeder.state())
        await asyncio.gather(
            seeder.dead_letters("orders", "billing", 9, ERRORS[:3]),
            seeder.dead_letters("emails", "mailer", 4, ERRORS[3:]),
            seeder.traces(),
            seeder.stream(),
        )
        # Somebody is at work on these.
        await seeder.call("GET", "/api/v1/pop/queue/search-index?consumerGroup=indexer&batch=20&partitions=4")
        await seeder.call("GET", "/api/v1/pop/queue/image-resize?consumerGroup=resizer&batch=5&partitions=2")


def add_pipelines(data_dir: Path) -> None:
    """What a pipeline that runs, and one that failed, report."""
    now = time.time()
    sinks = [
        QueryStatus(name="orders-parquet", rows=184_220, written=184_220, batches=412, rows_per_second=418.2,
                    batch_seconds=1.9, lag=310, state_rows=0),
        QueryStatus(name="revenue-by-minute", rows=184_220, written=3_070, batches=412, rows_per_second=418.2,
                    batch_seconds=2.4, lag=310, late=12, state_rows=2_480),
    ]  # fmt: skip
    reports = (
        PipelineStatus(name="orders-lake", state=PipelineState.RUNNING, pid=4711, file="orders.yaml",
                       master="local[2]", started_at=now - 5400, updated_at=now, queries=sinks),
        PipelineStatus(name="nightly-reconcile", state=PipelineState.FAILED, pid=4312, file="reconcile.yaml",
                       master="local[2]", started_at=now - 30_000, updated_at=now - 28_000,
                       error="AnalysisException: column 'amount' does not exist in queue payments",
                       queries=[QueryStatus(name="mismatches", rows=60_000, written=60_000, batches=1)]),
    )  # fmt: skip
    for report in reports:
        place = data_dir / "pipelines" / report.name
        place.mkdir(parents=True, exist_ok=True)
        write_status(place, report)


def _busy(at: datetime) -> float:
    """The ups and downs of a shop's day."""
    return 0.65 + 0.35 * math.sin((at.hour * 60 + at.minute) / 1440 * 2 * math.pi - 1.2)


async def add_history(dsn: str, port: int, hours: int = 24) -> None:
    """A day of figures of the two workers of the host, in place of those of the servers before the one at this port."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("TRUNCATE queen.metric_minutes, queen.metric_queue_minutes")
    await connection.execute("DELETE FROM queen.metric_lives WHERE port <> $1", port)
    chance = random.Random(11)
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    lives = [(uuid.UUID(int=number + 1, version=4), socket.gethostname(), number) for number in range(2)]
    workers, queues = [], []
    for minute in range(hours * 60, 0, -1):
        at = now - timedelta(minutes=minute)
        wave = _busy(at) * (1 + 0.12 * math.sin(minute / 7) + chance.uniform(-0.06, 0.06))
        for life, host, number in lives:
            pushed = popped = acked = failed = 0
            lag = 0.0
            for name, *_, groups, rate, behind in QUEUES:
                push = int(rate * PACE * wave * chance.uniform(0.93, 1.07))
                pop = int(push * len(groups) * chance.uniform(0.96, 1.04))
                wait = (4 + 20 * wave + min(behind, 60) / 8) * chance.uniform(0.8, 1.3)
                fails = chance.choice((0, 0, 0, 1, 2)) if name in ("orders", "emails") else 0
                queues.append((life, hours * 60 - minute, host, number, name, at, 60.0, push // 12, push, pop // 10,
                               pop, pop // 60, pop // 20, pop, fails, 0, pop * wait, wait * 9, 4.0 * len(groups),
                               24))  # fmt: skip
                pushed, popped, acked, failed = pushed + push, popped + pop, acked + pop, failed + fails
                lag += pop * wait
            load = 1 - 0.13 * number + chance.uniform(-0.03, 0.03)
            spread = [[value * load, value * load * 0.6, value * load * 1.5, value * load] for value in (
                0.4 + wave, 9 - 3 * wave, wave / 9, 5.0, 10.0, 10 - wave, wave, 40 * wave, 25.0,
                900 * wave, 240 * wave, 5.8e7 + 2e6 * wave, 2.8e8)]  # fmt: skip
            workers.append((life, hours * 60 - minute, host, port, number, 4000 + number, at, 60.0, pushed // 12,
                            pushed, popped // 10, popped, popped // 60, popped // 20, acked, failed, failed // 2, lag,
                            60 + 240 * wave, 0, pushed // 9, pushed // 6, *spread))  # fmt: skip
    await connection.copy_records_to_table(
        "metric_minutes",
        schema_name="queen",
        records=workers,
        columns=["life", "flush", "host", "port", "worker_id", "pid", "at", "seconds", "push_requests",
                 "push_messages", "pop_requests", "pop_messages", "pop_empty", "ack_requests", "ack_success",
                 "ack_failed", "dead_letters", "lag_ms", "lag_max_ms", "db_errors", "batches", "http_responses",
                 "loop_lag_ms", "free_slots", "job_queue", "db_connections", "pool_size", "pool_idle", "pool_active",
                 "in_flight", "parked", "cpu_user", "cpu_system", "rss_bytes", "virtual_bytes"],
    )  # fmt: skip
    await connection.copy_records_to_table(
        "metric_queue_minutes",
        schema_name="queen",
        records=queues,
        columns=["life", "flush", "host", "worker_id", "queue_name", "at", "seconds", "push_requests",
                 "push_messages", "pop_requests", "pop_messages", "pop_empty", "ack_requests", "ack_success",
                 "ack_failed", "transactions", "lag_ms", "lag_max_ms", "parked", "partition_count"],
    )  # fmt: skip
    for name, *_, behind in QUEUES:
        if behind < BEHIND:
            continue
        # Older messages make groups that are behind later, too.
        await connection.execute(
            "UPDATE queen.segments s SET created_at = s.created_at - make_interval(secs => $2 + 400 * random())"
            " FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " WHERE q.name = $1 AND s.partition_id = p.id",
            name,
            float(behind),
        )
    await connection.execute(
        "UPDATE queen.queues SET created_at = created_at - interval '40 days' - interval '3 days' * random()"
    )
    await connection.execute("UPDATE queen.dead_letters SET failed_at = failed_at - interval '1 hour' * random() * 9")
    await connection.close()


async def keep_busy(url: str, stopped: Callable[[], bool]) -> None:
    """Push and consume as in the minutes before, so that live figures move, and go on where the history ends."""
    chance = random.Random(3)
    workers = 2

    async def push(seeder: Seeder) -> None:
        owed = dict.fromkeys((name for name, *_ in QUEUES), 0.0)
        before = time.monotonic()
        while not stopped():
            await asyncio.sleep(0.25)
            now, at = time.monotonic(), datetime.now(UTC)
            items = []
            for name, _, _, partitions, *_, rate, _ in QUEUES:
                owed[name] += rate * PACE * workers / 60 * _busy(at) * (now - before) * chance.uniform(0.5, 1.5)
                for number in range(int(owed[name])):
                    partition = f"customer-{1 + chance.randrange(partitions)}" if partitions > 1 else "Default"
                    items.append({"queue": name, "partition": partition, "payload": _payload(name, number, chance)})
                owed[name] %= 1
            before = now
            if items:
                await seeder.call("POST", "/api/v1/push", {"items": items})

    async def consume(seeder: Seeder, queue: str, group: str) -> None:
        while not stopped():
            await seeder.consume(queue, group, 100)
            await asyncio.sleep(0.25)

    async with aiohttp.ClientSession() as session:
        seeder = Seeder(session, url)
        await asyncio.gather(
            push(seeder),
            *(
                consume(seeder, name, group)
                for name, *_, groups, _, behind in QUEUES
                if behind < BEHIND
                for group in groups.keys() - {"analytics"}
            ),
        )


def _payload(queue: str, number: int, chance: random.Random) -> dict[str, Any]:
    return {
        "id": 10_000 + number,
        "kind": queue.rstrip("s"),
        "customer": {"id": chance.randint(100, 999), "city": chance.choice(CITIES)},
        "total": round(chance.uniform(5, 400), 2),
        "items": [{"sku": f"SKU-{chance.randint(1000, 9999)}", "quantity": chance.randint(1, 4)} for _ in range(2)],
        "express": chance.random() < 0.2,
    }
