"""Metrics for Prometheus: every family, for the whole host whichever worker answers, and never backwards."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from queen.server.worker import Worker
from tests.acceptance.served import served
from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection

FAMILIES = (
    "queen_start_time_seconds",
    "queen_uptime_seconds",
    "queen_process_resident_memory_bytes",
    "queen_process_virtual_memory_bytes",
    "queen_cpu_user_microseconds_total",
    "queen_cpu_system_microseconds_total",
    "queen_db_pool_size",
    "queen_db_pool_idle",
    "queen_db_pool_active",
    "queen_threadpool_size",
    "queen_threadpool_queue_size",
    "queen_response_registry_size",
    "queen_sidecar_op_count",
    "queen_sidecar_op_latency_microseconds",
    "queen_sidecar_op_items",
    "queen_queue_backoff_groups",
    "queen_queue_backoff_queues",
    "queen_queue_backoff_avg_interval_milliseconds",
    "queen_cluster_push_requests_total",
    "queen_cluster_pop_requests_total",
    "queen_cluster_ack_requests_total",
    "queen_cluster_transactions_total",
    "queen_cluster_push_messages_total",
    "queen_cluster_pop_messages_total",
    "queen_cluster_ack_messages_total",
    "queen_cluster_db_errors_total",
    "queen_cluster_dlq_total",
    "queen_cluster_ack_total",
    "queen_queue_pop_messages_per_minute",
    "queen_queue_push_requests_per_minute",
    "queen_queue_push_messages_per_minute",
    "queen_queue_pop_empty_per_minute",
    "queen_queue_transactions_per_minute",
    "queen_queue_parked_consumers",
    "queen_queue_metrics_age_seconds",
    "queen_queue_pop_lag_milliseconds",
    "queen_queue_ack_per_minute",
    "queen_worker_event_loop_lag_milliseconds",
    "queen_worker_lag_milliseconds",
    "queen_worker_free_slots",
    "queen_worker_job_queue_size",
    "queen_worker_db_connections",
    "queen_worker_backoff_size",
    "queen_worker_jobs_done_per_minute",
    "queen_worker_db_errors_per_minute",
    "queen_worker_dlq_per_minute",
    "queen_worker_metrics_age_seconds",
    "queen_worker_requests_per_minute",
    "queen_worker_messages_per_minute",
    "queen_worker_ack_per_minute",
    "queen_dlq_depth",
    "queen_dlq_depth_by_queue",
    "queen_push_latency_seconds_bucket",
    "queen_pop_latency_seconds_bucket",
    "queen_ack_latency_seconds_bucket",
    "queen_fusion_batch_size_bucket",
    "queen_queue_lag_messages",
    "queen_metrics_queues_left_out",
    "queen_http_responses_total",
    "queen_database_up",
)


class Scraped:
    """The samples of one scrape, as Prometheus itself reads them."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        assert all(family.documentation for family in families)
        self.samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        (found,) = self.values(name, **labels)
        return found

    def values(self, name: str, **labels: str) -> list[float]:
        return [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for sample in self.samples
            if sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
        }


async def scrape(url: str) -> Scraped:
    # A connection of its own, so that any worker may answer.
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics/prometheus") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-cache"
        return Scraped(await answer.text())


async def work(api: Api, queue: str) -> None:
    """Five messages pushed, three popped and acked, one of them refused."""
    await api.configure(queue, retryLimit=0)
    await api.push(queue, *range(5))
    await api.ack(await api.pop(queue, batch=2, consumerGroup="workers"), group="workers")
    await api.ack(await api.pop(queue, consumerGroup="workers"), "failed", group="workers")


async def test_every_family_has_its_value(api: Api) -> None:
    await work(api, "shop")
    found = await scrape(api.url)
    assert sorted(set(FAMILIES) - found.names) == []
    assert found.value("queen_messages_total", op="push") == 5
    assert found.value("queen_messages_total", op="pop") == 3
    assert found.value("queen_ack_total", result="success") == 2
    assert found.value("queen_ack_total", result="failed") == 1
    assert found.value("queen_dead_letters_total") == 1
    assert found.value("queen_cluster_push_messages_total", scope="cluster") == 5
    assert found.value("queen_cluster_ack_total", scope="cluster", result="success") == 2
    assert found.value("queen_cluster_dlq_total", scope="cluster") == 1
    assert found.value("queen_dlq_depth", scope="cluster") == 1
    assert found.value("queen_dlq_depth_by_queue", queue="shop") == 1
    assert found.value("queen_queue_lag_messages", queue="shop", group="workers") == 2
    assert found.value("queen_queue_pending_messages", queue="shop") == 2
    assert found.value("queen_push_latency_seconds_count") == 1
    assert found.value("queen_pop_latency_seconds_count") == 2
    assert found.value("queen_ack_latency_seconds_count") == 2
    assert found.value("queen_fusion_batch_size_count", op="push") == 1
    assert found.value("queen_database_up") == 1
    assert found.value("queen_workers") == 1
    assert found.value("queen_http_responses_total", status="201") == 1
    assert found.value("queen_queue_push_messages_per_minute", queue="shop") > 0
    assert found.value("queen_worker_messages_per_minute", op="push") > 0
    assert found.value("queen_process_resident_memory_bytes") > 10_000_000


async def test_the_small_metrics_are_real_too(start_server: StartServer) -> None:
    api = await start_server(metrics_sample_interval_ms=20)
    await work(api, "shop")
    body = (await api.call("GET", "/metrics")).body
    assert list(body) == ["uptime", "requests", "messages", "database", "memory", "cpu"]
    assert body["messages"]["total"] == 8 and body["messages"]["rate"] > 0
    assert body["requests"]["total"] == 6
    assert set(body["database"]) == {"poolSize", "idleConnections", "waitingRequests"}
    assert set(body["memory"]) == {"rss", "heapTotal", "heapUsed", "external", "arrayBuffers"}
    assert body["memory"]["rss"] > 10_000_000 and body["cpu"]["user"] > 0

    async def sampled() -> bool:
        return bool((await api.call("GET", "/metrics")).body["database"]["poolSize"] >= 1)

    await until(sampled)


async def test_pops_that_wait_are_seen(start_server: StartServer) -> None:
    api = await start_server(metrics_sample_interval_ms=20)
    waiting = asyncio.create_task(api.pop("shop", wait=True, timeout=20_000))

    async def parked() -> bool:
        return (await scrape(api.url)).value("queen_parked_pops", worker_id="0") == 1

    await until(parked)
    await api.push("shop", 1)
    await waiting


async def test_the_lag_of_a_group_that_has_only_subscribed_is_exact(api: Api) -> None:
    await api.push("shop", 1, 2)
    await api.pop("shop", consumerGroup="late", subscriptionMode="new")
    await api.push("shop", 3, 4, 5)
    await api.push("shop", 6, partition="other")
    found = await scrape(api.url)
    assert found.value("queen_queue_lag_messages", queue="shop", group="late") == 4


async def test_queues_beyond_the_limit_are_left_out_and_counted(start_server: StartServer) -> None:
    api = await start_server(metrics_max_queues=2)
    for number, name in enumerate(("small", "large", "middle", "tiny")):
        await api.push(name, *range((1, 9, 5, 1)[number]))
        await api.pop(name, consumerGroup="g")
    found = await scrape(api.url)
    assert found.value("queen_metrics_queues_left_out") == 2
    queues = {sample.labels["queue"] for sample in found.samples if "queue" in sample.labels}
    assert queues == {"large", "middle"}
    for number in range(25):
        await api.pop("large", consumerGroup=f"group-{number}")
    found = await scrape(api.url)
    assert len(found.values("queen_queue_lag_messages")) == 20
    assert found.value("queen_metrics_lags_left_out") == 7


async def test_every_worker_speaks_for_its_host(start_server: StartServer) -> None:
    servers = [
        await start_server(worker_id=number, num_workers=3, metrics_sample_interval_ms=50) for number in range(3)
    ]
    for number, api in enumerate(servers):
        await api.push("shop", *range(number + 1))
    for api in servers:

        async def told(url: str = api.url) -> bool:
            found = await scrape(url)
            return (
                found.value("queen_messages_total", op="push") == 6
                and found.value("queen_queue_messages_total", op="push", queue="shop") == 6
                and found.value("queen_cluster_push_messages_total") == 6
                and found.value("queen_push_latency_seconds_count") == 3
                and found.value("queen_workers") == 3
                and len(found.values("queen_worker_db_connections")) == 3
            )

        await until(told)


async def test_the_cluster_is_all_hosts(start_server: StartServer, tmp_path: Path) -> None:
    """Two servers that share no directory know each other by what they flushed."""
    here = await start_server()
    await here.push("shop", 1, 2)
    assert here.worker is not None
    (tmp_path / "there").mkdir()
    there = Worker(here.worker.settings, 0, tmp_path / "there", port=0)
    await there.start()
    other = Api(f"http://127.0.0.1:{there.port}", there)
    await other.push("shop", 3)
    await there.recorder.flush()
    found = await scrape(here.url)
    assert found.value("queen_messages_total", op="push") == 2
    assert found.value("queen_cluster_push_messages_total") == 3
    await other.close()
    await there.stop()
    assert (await scrape(here.url)).value("queen_cluster_push_messages_total") == 3


async def test_without_postgres_the_host_can_still_be_seen(start_server: StartServer, connection: Connection) -> None:
    api = await start_server()
    await api.push("shop", 1)
    await connection.execute("ALTER TABLE queen.queues RENAME TO hidden")
    found = await scrape(api.url)
    await connection.execute("ALTER TABLE queen.hidden RENAME TO queues")
    assert found.value("queen_database_up") == 0
    assert found.value("queen_messages_total", op="push") == 1
    assert "queen_cluster_push_messages_total" not in found.names


async def test_counters_never_go_backwards_when_a_worker_is_killed(tmp_path: Path) -> None:
    """Real processes: a worker is killed, and the one in its place goes on counting from where it was."""
    with served(tmp_path, METRICS_SAMPLE_INTERVAL_MS="50") as server:
        before: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for number in range(4):
            api = Api(server.url)
            await asyncio.gather(*(api.push("shop", *range(10)) for _ in range(4)))
            await api.close()

            async def told(messages: int = 40 * (number + 1)) -> bool:
                return (await scrape(server.url)).value("queen_messages_total", op="push") == messages

            await until(told)
            counters = (await scrape(server.url)).counters()
            assert {key: counters.get(key) for key, value in before.items() if counters.get(key, 0) < value} == {}
            before = counters
            if number == 1:
                await _replace_a_worker(server.url)


async def _replace_a_worker(url: str) -> None:
    workers = _workers(url)
    os.kill(min(workers), signal.SIGKILL)

    async def replaced() -> bool:
        now = _workers(url)
        return len(now) == len(workers) and now != workers

    await until(replaced)


def _workers(url: str) -> set[int]:
    """The processes that listen there."""
    port = int(url.rpartition(":")[2])
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid is not None
    }


async def test_the_spool_and_maintenance_are_seen(api: Api) -> None:
    found = await scrape(api.url)
    assert found.value("queen_file_buffer_pending") == 0
    assert found.value("queen_file_buffer_db_healthy") == 1
    assert found.value("queen_maintenance_mode_enabled") == 0
    assert found.value("queen_shared_state_enabled") == 1
    assert not found.values("queen_servers")
    await api.call("POST", "/api/v1/system/maintenance", {"enabled": True})
    await api.push("shop", 1, 2, 3)
    found = await scrape(api.url)
    assert found.value("queen_maintenance_mode_enabled") == 1
    assert found.value("queen_file_buffer_pending") == 3
    assert found.value("queen_spool_messages_total") == 3
    assert found.value("queen_spool_bytes") > 0
    await api.call("POST", "/api/v1/system/maintenance", {"enabled": False})

    async def replayed() -> bool:
        found = await scrape(api.url)
        return found.value("queen_file_buffer_pending") == 0 and found.value("queen_spool_replayed_messages_total") == 3

    await until(replayed)


async def test_other_hosts_are_seen(start_server: StartServer) -> None:
    api = await start_server(queen_peers=("http://127.0.0.1:9",))
    found = await scrape(api.url)
    assert found.value("queen_servers", state="alive") == 0
    assert found.values("queen_transport_messages_total")
