"""Writes data-0.1.tar.xz and expected.json: all that version 0.1 stores, and what a later version must find there.

Both files are frozen. They were made with the code of commit 8b34197, checked out at $OLD, from the root of this tree:

    PYTHONPATH=$OLD/src python -m tests.compat.write_data tests/compat

and are not to be made again with later code: old data that new code has written would prove nothing.

The server is killed while pushes wait in the spool and items of a buffered namespace in their log. PostgreSQL is then
stopped cleanly, so that what is staged survives. Times that would pass (leases of items, the age of what is staged) are
moved to the year 2100 before that; leases of queues and windows of deduplication are long enough by themselves.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg
import psutil

from tests.compat.served import Http, serving
from tests.support.ageing import block_until

ARCHIVE, EXPECTED = "data-0.1.tar.xz", "expected.json"
TEN_YEARS = 10 * 365 * 86_400
FOREVER = 2**31 - 1
LATER = "2100-01-01T00:00:00Z"
PARTITIONS = ("p0", "p1", "p2")
Found = dict[str, Any]


def sha256(value: Any) -> str:
    """The hash of a JSON value, however long it is."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def large_payload(seed: int) -> Found:
    """Large enough to be compressed, and to lie out of line."""
    words = [f"word-{number}" for number in range(200)]
    return {"seed": seed, "text": " ".join(random.Random(seed).choices(words, k=30_000))}


class Writer:
    """Fills one server; `found` is what must be found later."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self.found: Found = {"written_at": datetime.now(UTC).isoformat(), "logs": []}
        self._popped: Counter[str] = Counter()

    def pop(self, queue: str, partition: str | None = None, **query: Any) -> list[Found]:
        messages = self.http.pop(queue, partition, **query)
        self._popped[queue] += len(messages)
        return messages

    def configure(self, queue: str, namespace: str = "", task: str = "", **options: Any) -> None:
        body = {"queue": queue, "namespace": namespace, "task": task, "options": options}
        assert self.http.post("/api/v1/configure", body)["configured"] is True
        self.found.setdefault("queues", {})[queue] = self.http.get(f"/api/v1/status/queues/{queue}")["queue"]

    def push(self, queue: str, count: int, partition: str = "Default", prefix: str = "", first: int = 0) -> None:
        """Messages with transaction ids of their own, some to a request."""
        prefix = prefix or f"{queue}-{partition}"
        items = [
            {
                "queue": queue,
                "partition": partition,
                "transactionId": f"{prefix}-{number}",
                "payload": {"n": number, "text": f"{prefix} é 東 {number}"},
            }
            | ({"traceId": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{prefix}-{number}"))} if number % 5 == 0 else {})
            for number in range(first, first + count)
        ]
        for begin in range(0, count, 7):
            results = self.http.push(*items[begin : begin + 7])
            assert {one["status"] for one in results} == {"queued"}, results

    def queues(self) -> None:
        self.configure(
            "orders",
            "billing",
            "ingest",
            leaseTime=TEN_YEARS,
            retryLimit=1,
            retryDelay=0,
            priority=7,
            ttl=FOREVER,
            dedupWindowSeconds=FOREVER,
            retentionEnabled=True,
            retentionSeconds=FOREVER,
            completedRetentionSeconds=FOREVER,
            maxWaitTimeSeconds=FOREVER,
        )
        for partition in PARTITIONS:
            self.push("orders", 40, partition)
        self.configure("secrets", leaseTime=TEN_YEARS, encryptionEnabled=True)
        self.push("secrets", 10)
        self.configure("shapes")
        odd: tuple[Any, ...] = (
            None,
            True,
            0,
            -1.5,
            2**53 + 1,
            "",
            "\u0000 \U0001f451",
            [],
            {},
            [[1, {"a": [None]}]],
            {"": {"é": "ß"}},
        )
        self.http.push(*({"queue": "shapes", "transactionId": f"s{n}", "payload": one} for n, one in enumerate(odd)))
        self.configure("large")
        for seed in range(3):
            self.http.push({"queue": "large", "transactionId": f"large-{seed}", "payload": large_payload(seed)})

    def groups(self) -> None:
        http = self.http
        groups = self.found["groups"] = {}
        assert self.pop("orders", consumerGroup="late", subscriptionMode="new") == []
        self.push("orders", 4, "p0", first=40)
        http.ack(self.pop("orders", "p0", batch=100, consumerGroup="fast"), group="fast")
        http.ack(self.pop("orders", "p1", batch=15, consumerGroup="fast"), group="fast")
        leased = self.pop("orders", "p1", batch=5, consumerGroup="fast")
        http.ack(self.pop("orders", "p0", batch=5, consumerGroup="slow"), group="slow")
        self.pop("orders", "p2", batch=10, autoAck="true")
        failing = self.pop("orders", "p2", batch=3, consumerGroup="retrying")
        (first, *_) = http.ack(failing, "failed", "retrying", "not yet")
        assert (first["success"], first["dlq"]) == (True, False)
        secret = self.pop("secrets", batch=4)
        # The next message of each; partitions that are not named are untouched.
        groups["orders"] = [
            {"group": "fast", "partition": "p0", "next": None},
            {"group": "fast", "partition": "p1", "next": "orders-p1-20", "after_the_lease": True},
            {"group": "slow", "partition": "p0", "next": "orders-p0-5"},
            {"group": None, "partition": "p2", "next": "orders-p2-10"},
            {"group": "late", "partition": "p0", "next": "orders-p0-40"},
            {"group": "late", "partition": "p1", "next": None},
        ]
        groups["leases"] = [
            {"queue": "orders", "partition": "p1", "group": "fast", "messages": leased},
            {"queue": "secrets", "partition": "Default", "group": None, "messages": secret},
        ]
        groups["retrying"] = {"queue": "orders", "partition": "p2", "group": "retrying", "next": "orders-p2-0"}

    def dead_letters(self) -> None:
        http = self.http
        self.configure("failing", retryLimit=0, leaseTime=TEN_YEARS, dedupWindowSeconds=FOREVER)
        self.push("failing", 6)
        for group, status in (("workers", "failed"), (None, "dlq")):
            messages = self.pop("failing", batch=3, **({"consumerGroup": group} if group else {}))
            results = http.ack(messages, status, group, f"refused by {group}")
            assert all(one["dlq"] for one in results), results
        self.found["dead_letters"] = http.get("/api/v1/dlq", queue="failing")["messages"]
        assert len(self.found["dead_letters"]) == 6

    def traces(self) -> None:
        (message,) = self.pop("orders", "p0", consumerGroup="tracing")
        for number in range(3):
            body = {"transactionId": message["transactionId"], "partitionId": message["partitionId"]}
            body |= {"data": {"step": number}, "eventType": "step", "traceNames": ["checkout", f"step-{number}"]}
            self.http.post("/api/v1/traces", body | {"consumerGroup": "tracing"})
        where = f"{message['partitionId']}/{message['transactionId']}"
        self.found["traces"] = {
            "of": where,
            "leased": message,
            "traces": self.http.get(f"/api/v1/traces/{where}")["traces"],
        }

    def transactions(self) -> None:
        (message,) = self.pop("orders", "p1", consumerGroup="ledger")
        ack = {name: message[name] for name in ("transactionId", "partitionId", "leaseId")}
        operations = [
            {"type": "ack", "consumerGroup": "ledger"} | ack,
            {
                "type": "push",
                "items": [{"queue": "ledger", "payload": {"n": n}, "transactionId": f"t{n}"} for n in (0, 1)],
            },
            {"type": "enqueue", "items": [{"namespace": "jobs", "topic": "receipts", "data": "from a transaction"}]},
        ]
        answer = self.http.post("/api/v1/transaction", {"operations": operations})
        assert answer["success"], answer
        self.found["groups"]["orders"].append({"group": "ledger", "partition": "p1", "next": "orders-p1-1"})

    def streams(self) -> None:
        http = self.http
        query = {"name": "totals", "source_queue": "orders", "sink_queue": "sums", "config_hash": "h1"}
        query_id = http.post("/streams/v1/queries", query)["query_id"]
        messages = self.pop("orders", "p0", consumerGroup="streams.totals", batch=6)
        last = messages[-1]
        cycle = {
            "query_id": query_id,
            "partition_id": last["partitionId"],
            "consumer_group": "streams.totals",
            "state_ops": [
                {"type": "upsert", "key": "sum", "value": {"total": 15, "windowEnd": 1000}},
                {"type": "upsert", "key": "names", "value": ["é", None, 1.5]},
            ],
            "push_items": [{"queue": "sums", "payload": {"total": 15}, "transactionId": "sum-1"}],
            "ack": {name: last[name] for name in ("transactionId", "leaseId")} | {"status": "completed", "count": 6},
        }
        answer = http.post("/streams/v1/cycle", cycle)
        assert answer["success"], answer
        asked = {"query_id": query_id, "partition_id": last["partitionId"]}
        rows = http.post("/streams/v1/state/get", asked)["rows"]
        self.found["streams"] = {"query": query, "query_id": query_id, "asked": asked, "rows": rows}
        self.found["groups"]["orders"].append({"group": "streams.totals", "partition": "p0", "next": "orders-p0-6"})

    def stages(self) -> None:
        self.configure("staged", dedupWindowSeconds=FOREVER)
        stages = self.found["stages"] = {"run": "compat-run"}
        for batch in (0, 1):
            attempts = [self._stage(batch, attempt) for attempt in range(2)]
            # One that failed, and is not named.
            self._stage(batch, 7)
            stages[f"batch_{batch}"] = {"run": "compat-run", "batch": batch, "attempts": attempts}
        answer = self.http.post("/api/v1/stages/publish", stages["batch_0"])
        assert (answer["messages"], answer["repeated"]) == (10, False), answer
        stages["messages_of_batch_1"] = [f"staged-1-{attempt}-{n}" for attempt in range(2) for n in range(4)]
        stages["items_of_batch_1"] = ["staged 1 by 0", "staged 1 by 1"]

    def _stage(self, batch: int, attempt: int) -> Found:
        id = str(uuid.UUID(int=batch * 100 + attempt + 1, version=4))
        ids = [f"staged-{batch}-{attempt}-{number}" for number in range(4)]
        body = {
            "run": "compat-run",
            "batch": batch,
            "attempt": id,
            "items": [{"queue": "staged", "transactionId": one, "payload": {"id": one}} for one in ids],
            "topicItems": [{"namespace": "jobs", "topic": f"staged-{batch}", "data": f"staged {batch} by {attempt}"}],
        }
        answer = self.http.post("/api/v1/stages", body)
        return {"attempt": id, "messages": answer["staged"]}

    def topics(self) -> None:
        topics = self.found["topics"] = {}
        options = {"max_retries": 5, "backoff_base_ms": 0, "lease_seconds": 600}
        self._configure_topic("jobs", "mixed", **options)
        self._configure_topic("jobs", "fragile", max_retries=0)
        self._configure_topic("jobs", "once", at_most_once=True)
        where = {"namespace": "jobs", "topic": "mixed"}
        self._enqueue(*(where | {"data": {"leased": n}, "priority": -9} for n in range(3)))
        leased = self._topic("GET", "/dequeue", **where, limit=3)
        topics["leased"] = leased
        self._enqueue(
            *(where | {"data": {"n": n}, "priority": n % 3, "metadata": {"n": n, "é": [None]}} for n in range(9)),
            where | {"payload": base64.b64encode(bytes(range(256))).decode(), "priority": 1, "ttl": TEN_YEARS},
            where | {"data": "in 2099", "priority": -5, "deliver_after": "2099-01-01T00:00:00Z"},
            where | {"data": "later in 2099", "deliver_after": "2099-06-01T00:00:00Z", "idempotency_key": "delayed"},
        )
        keyed = [where | {"data": f"keyed {n}", "priority": 8, "idempotency_key": f"key-{n}"} for n in range(3)]
        self._enqueue(where | {"data": "failed once", "priority": -8})
        (failed,) = self._topic("GET", "/dequeue", **where, limit=1)
        self._topic("POST", "/nack", [_named(failed) | {"error": "try again"}])
        topics["keys"] = dict(zip((one["idempotency_key"] for one in keyed), self._enqueue(*keyed), strict=True))
        done = {"namespace": "jobs", "topic": "done", "data": "done", "idempotency_key": "key-of-a-done-item"}
        topics["keys"]["key-of-a-done-item"] = self._enqueue(done)[0]
        (item,) = self._topic("GET", "/dequeue", namespace="jobs", topic="done")
        assert self._topic("POST", "/ack", [_named(item)])[0]["success"]
        fragile = {"namespace": "jobs", "topic": "fragile"}
        self._enqueue(*(fragile | {"data": {"dead": n}, "idempotency_key": f"dead-{n}"} for n in range(3)))
        for item in self._topic("GET", "/dequeue", **fragile):
            self._topic("POST", "/nack", [_named(item) | {"error": f"broken {item['data']}"}])
        topics["dead"] = self._topic("GET", "/dlq", **fragile)
        assert len(topics["dead"]) == 3
        self._enqueue({"namespace": "jobs", "topic": "once", "data": "at most once"})
        self._topic("PUT", "/quotas", {"namespace": "limited", "per_minute": 5})
        self._enqueue({"namespace": "limited", "topic": "t", "data": 1})
        topics["quotas"] = self._topic("GET", "/quotas")
        self._topic("PUT", "/modes", {"namespace": "fastlane", "mode": "buffered"})
        topics["modes"] = self._topic("GET", "/modes")
        lane = {"namespace": "fastlane", "topic": "lane"}
        ids = self._enqueue(*(lane | {"data": f"stored {n}", "priority": n % 2} for n in range(6)))
        block_until(lambda: len(self._peek("fastlane", "lane")) == 6, "buffered items are stored")
        topics["stored_of_the_buffered"] = ids

    def _configure_topic(self, namespace: str, topic: str, **options: Any) -> None:
        body = {"namespace": namespace, "topic": topic, "options": options}
        configured = self._topic("POST", "/configure", body)
        self.found["topics"].setdefault("options", []).append(body | {"options": configured["options"]})

    def _enqueue(self, *items: Found) -> list[int]:
        ids: list[int] = self._topic("POST", "/enqueue", list(items))
        return ids

    def _peek(self, namespace: str, topic: str) -> list[Found]:
        items: list[Found] = self._topic("GET", "/peek", namespace=namespace, topic=topic, limit=100, delayed="true")
        return items

    def _topic(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        return self.http.good(method, f"/api/v1/topics{path}", body, **query)

    def metrics(self) -> None:
        """Wait until all that happened so far is counted in PostgreSQL."""
        now, minute = datetime.now(UTC), timedelta(minutes=1)
        span = {"from": (now - 10 * minute).isoformat(), "to": (now + minute).isoformat()}
        expected = {"pushMessages": 3 * 40 + 4, "popMessages": self._popped["orders"]}

        def counted() -> Found:
            series = self.http.get("/api/v1/analytics/queue-ops", queue="orders", **span)["series"]
            return {name: sum(point[name] for point in series) for name in expected}

        block_until(lambda: counted() == expected, "what happened to orders is counted")
        self.found["metrics"] = {"queue": "orders", "span": span, "counted": expected}

    def contents(self) -> None:
        """Everything stored so far, as a group reads it that has now seen all of it."""
        for partition in PARTITIONS:
            self._record("orders", partition)
        for queue in ("secrets", "shapes", "large", "failing", "ledger", "sums", "staged"):
            self._record(queue)
        self.found["topics"]["in_order"] = [
            {"namespace": namespace, "topic": topic, "items": self._peek(namespace, topic)}
            for namespace, topic in (("jobs", "mixed"), ("jobs", "once"), ("jobs", "receipts"), ("limited", "t"))
        ]

    def _record(self, queue: str, partition: str = "Default") -> None:
        messages = self.pop(queue, partition, batch=1000, autoAck="true", consumerGroup="auditor")
        assert messages
        log = {"queue": queue, "partition": partition, "messages": [_logged(one) for one in messages]}
        self.found["logs"].append(log)

    def set_aside(self) -> None:
        """A spooled push that its queue refused when it was replayed."""
        self.configure("full", maxSize=2)
        self.push("full", 2)
        self.maintenance(True)
        (result,) = self.http.push({"queue": "full", "transactionId": "full-3", "payload": "one too many"})
        assert result["status"] == "buffered"
        self.maintenance(False)
        block_until(lambda: self.http.get("/api/v1/status/buffers")["failed"] == 1, "the push is set aside")
        log = ["full-Default-0", "full-Default-1", "full-3"]
        self.found["set_aside"] = {"queue": "full", "log": log, "id": result["message_id"]}

    def maintenance(self, enabled: bool) -> None:
        self.http.post("/api/v1/system/maintenance", {"enabled": enabled})
        # Either worker may be asked.
        for _ in range(8):
            block_until(
                lambda: self.http.get("/api/v1/system/maintenance")["maintenanceMode"] is enabled,
                "all workers know of maintenance",
            )

    def spool(self) -> None:
        """Pushes that wait in the spool: to old and new partitions, to an encrypted queue, and one stored before."""
        self.configure("spooled", dedupWindowSeconds=FOREVER)
        for partition in ("a", "b"):
            self.push("spooled", 3, partition)
            self._record("spooled", partition)
        self.maintenance(True)
        (duplicate,) = self.http.push({"queue": "spooled", "partition": "a", "transactionId": "spooled-a-1"})
        assert duplicate["status"] == "buffered"
        logs: dict[tuple[str, str], list[Found]] = {}
        targets = (("spooled", "a"), ("spooled", "b"), ("secrets", "Default"), ("made-by-replay", "Default"))
        for number in range(10):
            for queue, partition in targets:
                items = [
                    {
                        "queue": queue,
                        "partition": partition,
                        "transactionId": f"spool-{queue}-{partition}-{number}-{n}",
                        "payload": {"number": number, "n": n, "text": "é" * 20},
                    }
                    for n in range(2)
                ]
                results = self.http.push(*items)
                assert {one["status"] for one in results} == {"buffered"}, results
                logs.setdefault((queue, partition), []).extend(
                    {"id": result["message_id"], "transactionId": item["transactionId"], "data": item["payload"]}
                    for item, result in zip(items, results, strict=True)
                )
        self.found["spool"] = {
            "pending": 1 + sum(map(len, logs.values())),
            "logs": [{"queue": name, "partition": part, "messages": found} for (name, part), found in logs.items()],
        }

    def log_of_topics(self) -> None:
        """Items in the log of a buffered namespace, while the flusher cannot store them."""
        lane = {"namespace": "fastlane", "topic": "lane"}
        ids: list[int] = []
        items: list[Found] = []
        for number in range(10):
            batch: list[Found] = [lane | {"data": f"waiting {number}.{n}", "priority": n} for n in range(3)]
            if number == 4:
                batch.append(lane | {"data": "waiting until 2099", "deliver_after": "2099-01-01T00:00:00Z"})
            ids += self._enqueue(*batch)
            items += batch
        self.found["topics"]["waiting"] = [
            {"id": id} | {name: item[name] for name in ("data", "priority", "deliver_after") if name in item}
            for id, item in zip(ids, items, strict=True)
        ]


def _named(item: Found) -> Found:
    return {name: item[name] for name in ("id", "namespace", "topic", "lease_owner")}


def _logged(message: Found) -> Found:
    kept = {name: message[name] for name in ("id", "transactionId", "traceId", "createdAt", "partitionId", "data")}
    if len(json.dumps(kept["data"])) > 1000:
        kept["data_sha256"] = sha256(kept.pop("data"))
    return kept


async def _connect(cluster: Path) -> asyncpg.Connection[asyncpg.Record]:
    lines = (cluster / "postmaster.pid").read_text().splitlines()
    where = urlencode({"host": lines[4], "port": lines[3]})
    return await asyncpg.connect(f"postgresql://postgres@/postgres?{where}")


async def _write(http: Http, process: subprocess.Popen[bytes], cluster: Path) -> Found:
    writer = Writer(http)
    for step in (
        writer.queues,
        writer.groups,
        writer.dead_letters,
        writer.traces,
        writer.topics,
        writer.transactions,
        writer.streams,
        writer.stages,
        writer.contents,
        writer.metrics,
        writer.set_aside,
        writer.spool,
    ):
        await asyncio.to_thread(step)
    connection = await _connect(cluster)
    async with connection.transaction():
        await connection.execute("LOCK TABLE queen.topic_items IN ACCESS EXCLUSIVE MODE")
        await asyncio.to_thread(writer.log_of_topics)
        _kill_server(process)
        # Else what waits for the lock might be stored when it is free.
        await connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
    assert await connection.fetchval("SELECT count(*) FROM queen.topic_items WHERE payload LIKE '\"waiting%'") == 0
    for statement in (
        "UPDATE queen.topic_items SET leased_until = $1::timestamptz WHERE leased_until IS NOT NULL",
        "UPDATE queen.stages SET staged_at = $1::timestamptz",
        "UPDATE queen.stage_runs SET published_at = $1::timestamptz",
    ):
        await connection.execute(statement, datetime.fromisoformat(LATER))
    for item in writer.found["topics"]["leased"]:
        item["lease_expires_at"] = LATER
    await connection.execute("CHECKPOINT")
    await connection.close()
    return writer.found


def _kill_server(process: subprocess.Popen[bytes]) -> None:
    """The workers and what watches them, but not PostgreSQL."""
    children = [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() != "postgres"]
    for pid in (process.pid, *(child.pid for child in children)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, 10)


def _stop_postgres(cluster: Path) -> None:
    postmaster = psutil.Process(int((cluster / "postmaster.pid").read_text().splitlines()[0]))
    # The programs belong to the server that runs, whatever code started it.
    programs = Path(postmaster.exe()).parent
    postmaster.send_signal(signal.SIGINT)
    postmaster.wait(60)
    owner = cluster.stat()
    # One empty segment of its log in place of those that were used.
    command = [str(programs / "pg_resetwal"), "--pgdata", str(cluster)]
    subprocess.run(command, check=True, cwd=cluster, user=owner.st_uid, group=owner.st_gid)


def _pack(data_dir: Path, archive: Path) -> None:
    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (info.isfile() or info.isdir()) or info.name.endswith((".log", "postmaster.opts")):
            return None
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(data_dir, "data", filter=plain)


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data_dir = directory / "data"
        cluster = data_dir / "postgres" / "cluster"
        settings = {"FILE_BUFFER_EVENTS_PER_FILE": "8", "METRICS_AGGREGATE_INTERVAL_S": "1", "DB_AWAY_MS": "600000"}
        with serving(data_dir, directory / "log", **settings) as (http, process):
            try:
                found = asyncio.run(_write(http, process, cluster))
            except BaseException:
                print((directory / "log").read_text(), file=sys.stderr)
                raise
        _stop_postgres(cluster)
        (target / EXPECTED).write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
        _pack(data_dir, target / ARCHIVE)
    print(f"{target / ARCHIVE}: {(target / ARCHIVE).stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
