"""A real Prometheus scrapes a real server: every panel and every rule has data, and alerts fire at real faults.

That every alert fires at the samples of its fault is in test_rules.py. Here `make test` has those that matter most.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from queen.wire.pipelines import STATUS_FILE, PipelineState, PipelineStatus, write_status
from tests.deploy.monitored import Load, Prometheus, Redis, Server, lose_lock, overfill
from tests.deploy.tools import DEPLOY, tool
from tests.support.ageing import block_until

# Two waits for Prometheus, each of which a busy machine may draw out.
pytestmark = pytest.mark.timeout(300)

DASHBOARDS: Final = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES: Final = DEPLOY / "prometheus"

RESTARTS_SECONDS: Final = 120
"""Three restarts fit into it, each of which takes 20 seconds on a busy machine."""
SHORTER: Final = {"5m": "3s", "10m": "10s", "15m": "3s", "30m": f"{RESTARTS_SECONDS}s", "1h": "5s"}
"""How long rates look back here, where minutes have to be seconds."""
SMALLER: Final = {
    "QueenConsumerLagGrowing": ("> 10000", "> 100"),
    "QueenDedupSearchesDatabase": ("> 100", "> 0"),
    "QueenDeliveryLate": ("> 60000", "> 2000"),
    "QueenPipelineSilent": ("> 60", "> 2"),
    "QueenSpoolFilling": ("> 2e9", "> 0"),
    "QueenSpoolNotDraining": ("> 60", "> 1"),
    "QueenTimersLate": ("> 60", "> 1"),
    "QueenWorkerSilent": ("> 30", "> 4"),
}
"""Bounds that a test would need minutes or gigabytes for, and those it has instead."""
MOST_QUEUES: Final = 30


@dataclass
class Watched:
    server: Server
    prometheus: Prometheus
    redis: Redis


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    tool("prometheus")
    settings = {"METRICS_AGGREGATE_INTERVAL_S": "1", "NAMESPACE_MODES": "held:buffered"}
    settings |= {"MAX_BUFFER_LENGTH": "500", "NAMESPACE_QUOTAS": "small:1", "METRICS_MAX_QUEUES": str(MOST_QUEUES)}
    settings["DB_LOCK_TIMEOUT"] = "500"
    directory = tmp_path_factory.mktemp("monitored")
    for name in ("server", "prometheus"):
        (directory / name).mkdir()
    redis = Redis(directory)
    if shutil.which("redis-server") is not None:
        redis.start()
        settings["REDIS_ADDRS"] = f"127.0.0.1:{redis.port}"
    server = Server(directory / "server", **settings)
    prometheus = Prometheus(
        directory / "prometheus",
        [f"127.0.0.1:{server.port}"],
        {name: quickened((RULES / name).read_text()) for name in ("rules.yml", "alerts.yml")},
    )
    load = Load(server, "orders", ("plain", "held"))
    try:
        server.start()
        prometheus.start()
        load.start()
        yield Watched(server, prometheus, redis)
    finally:
        load.stop()
        prometheus.stop()
        server.stop()
        redis.kill()


def quickened(rules: str) -> str:
    """The same rules for a test: faults need not last, and may be small."""
    loaded = yaml.safe_load(rules)
    for group in loaded["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
            query = re.sub(r"\[(\w+)\]", lambda found: f"[{SHORTER.get(found[1], found[1])}]", rule["expr"])
            if "alert" in rule and rule["alert"] in SMALLER:
                bound, small = SMALLER[rule["alert"]]
                assert bound in query, rule
                query = query.replace(bound, small)
            rule["expr"] = query
    return str(yaml.safe_dump(loaded))


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries(path: Path) -> list[tuple[str, str]]:
    """Title and query of each target of a dashboard, variables filled in as Grafana does."""
    variables = {"$__rate_interval": "10s", "$queue": ".*", "$instance": ".*", "$namespace": ".*", "$topic": ".*"}
    found = []
    for panel in panels(path):
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in variables.items():
                query = query.replace(name, value)
            assert "$" not in query, query
            found.append((f"{path.stem}: {panel['title']}", query))
    return found


def has_data(prometheus: Prometheus, query: str) -> bool:
    return any(not math.isnan(float(sample["value"][1])) for sample in prometheus.query(query))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_of_a_dashboard_has_data(watched: Watched, path: Path) -> None:
    waiting = queries(path)
    assert len(waiting) > 10
    if shutil.which("redis-server") is None:
        waiting = [(title, query) for title, query in waiting if "queen_redis" not in query]

    def found_all() -> bool:
        waiting[:] = [(title, query) for title, query in waiting if not has_data(watched.prometheus, query)]
        return not waiting

    try:
        block_until(found_all, "every panel has data")
    except TimeoutError:
        pytest.fail("no data:\n" + "\n".join(f"{title}: {query}" for title, query in waiting))


def test_every_recording_rule_has_data(watched: Watched) -> None:
    rules = [rule for group in yaml.safe_load((RULES / "rules.yml").read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        labels = ", ".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
        query = f"{rule['record']}{{{labels}}}"
        block_until(partial(has_data, watched.prometheus, query), f"{query} has data")


def test_every_series_that_an_alert_asks_for_exists(watched: Watched) -> None:
    """An alert on a metric that is not exposed never fires. Pipelines expose theirs elsewhere."""
    named: set[str] = set()
    for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            named |= set(re.findall(r"\bqueen[_:][a-z0-9_:]+", rule["expr"]))
    missing = {name for name in named if not name.startswith("queen_pipeline_")}
    if shutil.which("redis-server") is None:
        missing.discard("queen_redis_up")

    def all_exist() -> bool:
        missing.difference_update([name for name in missing if watched.prometheus.query(name)])
        return not missing

    try:
        block_until(all_exist, "all series exist")
    except TimeoutError:
        pytest.fail(f"nobody exposes {missing}")


def test_consumers_are_scaled_by_what_waits_for_them(watched: Watched) -> None:
    server = watched.server
    example = (DEPLOY / "kubernetes" / "keda-consumers.yaml").read_text()
    (query,) = [
        trigger["metadata"]["query"]
        for document in yaml.safe_load_all(example)
        if document["kind"] == "ScaledObject"
        for trigger in document["spec"]["triggers"]
    ]
    query = query.replace('"orders"', '"scaled"').replace('"billing"', '"scalers"')

    def waiting(count: int) -> None:
        def counted() -> bool:
            return [float(sample["value"][1]) for sample in watched.prometheus.query(query)] == [count]

        block_until(counted, f"{count} messages wait")

    waiting(0)
    # Its first partition is there before its group is.
    server.push("scaled", 7)
    waiting(7)
    server.ack("scalers", server.pop("scaled", "scalers", batch=7))
    waiting(0)
    server.push("scaled", 3)
    waiting(3)
    server.ack("scalers", server.pop("scaled", "scalers", batch=3))
    chart = yaml.safe_load((DEPLOY / "helm" / "queen" / "values.yaml").read_text())
    query = chart["autoscaling"]["keda"]["query"]
    block_until(partial(has_data, watched.prometheus, query), "servers can be scaled")


def test_nothing_fires_while_all_is_well(watched: Watched) -> None:
    # The queue that the load consumes is there, so the rules have been evaluated on real samples.
    block_until(
        lambda: has_data(watched.prometheus, 'queen:queue_messages:rate5m{queue="orders", op="pop"} > 0'), "pops"
    )
    fires = {"QueenServerDown", "QueenNoServer", "QueenDatabaseUnavailable", "QueenDeadLetters", "QueenSpoolFilling"}
    block_until(lambda: not fires & set(watched.prometheus.firing()), "no alert fires")


def test_lag_that_grows_fires_until_it_is_consumed(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    server.push("backlog", 150)
    server.pop("backlog", "slow", batch=1)

    def fires() -> bool:
        server.push("backlog", 10)
        found = prometheus.firing().get("QueenConsumerLagGrowing", [])
        return any(labels["queue"] == "backlog" and labels["group"] == "slow" for labels in found)

    block_until(fires, "QueenConsumerLagGrowing fires")
    # The first message is leased and was not acked: its group is done with the queue when it is skipped.
    server.post("/api/v1/consumer-groups/slow/queues/backlog/seek", {"toEnd": True})
    block_until(lambda: "QueenConsumerLagGrowing" not in prometheus.firing(), "QueenConsumerLagGrowing stops")


@pytest.mark.soak
def test_a_queue_without_consumers_fires_until_it_has_one(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus

    def fires() -> bool:
        return any(labels["queue"] == "lonely" for labels in prometheus.firing().get("QueenQueueNotConsumed", []))

    server.push("lonely", 5)
    block_until(fires, "QueenQueueNotConsumed fires")
    server.ack("readers", server.pop("lonely", "readers"))
    block_until(lambda: not fires(), "QueenQueueNotConsumed stops")


def test_a_postgresql_that_does_not_answer_fires_until_it_does(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    faults = {
        "QueenDatabaseUnavailable",
        "QueenShardUnavailable",
        "QueenServerErrors",
        "QueenTopicBufferFull",
    }

    def all_fire() -> bool:
        # Pops are refused, and so is a buffered namespace once its buffer is full.
        for request in (partial(server.pop, "orders", "readers"), partial(enqueue, server, "held", 100)):
            with suppress(urllib.error.HTTPError):
                request()
        return faults <= set(prometheus.firing())

    server.signal_postgres(signal.SIGSTOP)
    try:
        block_until(all_fire, f"{faults} fire")
        (stored,) = server.post("/api/v1/push", {"items": [{"queue": "orders", "payload": "kept"}]})
        assert stored["status"] == "buffered"
    finally:
        server.signal_postgres(signal.SIGCONT)
    block_until(lambda: not faults & set(prometheus.firing()), f"{faults} stop")


@pytest.mark.soak
def test_clients_beyond_a_quota_fire_until_they_keep_to_it(watched: Watched) -> None:
    def fires() -> bool:
        return "QueenRequestsThrottled" in watched.prometheus.firing()

    def exceeds() -> bool:
        with suppress(urllib.error.HTTPError):
            enqueue(watched.server, "small", 1)
        return fires()

    block_until(exceeds, "QueenRequestsThrottled fires")
    block_until(lambda: not fires(), "QueenRequestsThrottled stops")


def enqueue(server: Server, namespace: str, count: int) -> None:
    server.post("/api/v1/topics/enqueue", [{"namespace": namespace, "topic": "jobs", "data": 1}] * count)


@pytest.mark.soak
def test_a_redis_that_is_down_fires_until_it_is_back(watched: Watched) -> None:
    tool("redis-server")
    watched.redis.kill()
    block_until(lambda: "QueenRedisUnavailable" in watched.prometheus.firing(), "QueenRedisUnavailable fires")
    watched.redis.start()
    block_until(lambda: "QueenRedisUnavailable" not in watched.prometheus.firing(), "QueenRedisUnavailable stops")


def test_dead_letters_fire_while_they_are_new(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    server.push("fragile", 3)
    query = 'queen:dlq_depth:max{queue="fragile"}'
    block_until(lambda: has_data(prometheus, query), "the queue is known")
    server.ack("workers", server.pop("fragile", "workers", batch=3), status="dlq")
    block_until(lambda: "QueenDeadLetters" in prometheus.firing(), "QueenDeadLetters fires")
    (labels,) = prometheus.firing()["QueenDeadLetters"]
    assert labels["queue"] == "fragile"
    block_until(lambda: "QueenDeadLetters" not in prometheus.firing(), "QueenDeadLetters stops")


@pytest.mark.soak
def test_maintenance_that_was_forgotten_fires_until_it_is_off(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    server.post("/api/v1/system/maintenance/pop", {"enabled": True})
    block_until(lambda: "QueenMaintenanceModeOn" in prometheus.firing(), "QueenMaintenanceModeOn fires")
    server.post("/api/v1/system/maintenance/pop", {"enabled": False})
    block_until(lambda: "QueenMaintenanceModeOn" not in prometheus.firing(), "QueenMaintenanceModeOn stops")


def check_fires_and_stops(
    watched: Watched, alert: str, fault: Callable[[], object], mend: Callable[[], object] = lambda: None
) -> None:
    """Make a fault again and again until the alert fires, then mend it until the alert stops."""

    def fires() -> bool:
        return alert in watched.prometheus.firing()

    def fires_at_fault() -> bool:
        fault()
        return fires()

    def stops_when_mended() -> bool:
        mend()
        return not fires()

    try:
        block_until(fires_at_fault, f"{alert} fires")
    finally:
        mend()
    block_until(stops_when_mended, f"{alert} stops")


@pytest.mark.soak
def test_messages_that_are_popped_late_fire(watched: Watched) -> None:
    server = watched.server
    server.push("late", 300)

    def pop_one() -> None:
        server.ack("sleepers", server.pop("late", "sleepers", batch=1))

    def skip_the_rest() -> None:
        server.post("/api/v1/consumer-groups/sleepers/queues/late/seek", {"toEnd": True})

    check_fires_and_stops(watched, "QueenDeliveryLate", pop_one, skip_the_rest)


@pytest.mark.soak
def test_a_slow_postgresql_fires(watched: Watched) -> None:
    def pause() -> None:
        watched.server.signal_postgres(signal.SIGSTOP)
        time.sleep(0.9)
        watched.server.signal_postgres(signal.SIGCONT)
        watched.server.push("orders", 1)

    check_fires_and_stops(watched, "QueenRequestsSlow", pause)


@pytest.mark.soak
def test_connections_that_break_fire(watched: Watched) -> None:
    check_fires_and_stops(
        watched,
        "QueenDatabaseErrors",
        lambda: watched.server.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname <> '' AND pid <> pg_backend_pid()"
        ),
    )


@pytest.mark.soak
def test_statements_that_wait_for_a_lock_exhaust_the_pool(watched: Watched) -> None:
    """Until they give up, they hold the connections of both workers."""
    server, over = watched.server, threading.Event()

    def ask(name: str) -> None:
        while not over.is_set():
            with suppress(urllib.error.HTTPError):
                server.get(f"/api/v1/traces/by-name/{name}")

    with ThreadPoolExecutor(60) as threads, server.locked("queen.trace_names"):
        for number in range(60):
            threads.submit(ask, f"trace-{number}")
        try:
            check_fires_and_stops(watched, "QueenDatabasePoolExhausted", lambda: None, over.set)
        finally:
            over.set()


@pytest.mark.soak
def test_an_event_loop_that_stands_still_fires(watched: Watched) -> None:
    def stand_still() -> None:
        worker = watched.server.workers()[0]
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        worker.send_signal(signal.SIGCONT)
        time.sleep(0.3)

    check_fires_and_stops(watched, "QueenEventLoopLagging", stand_still)


@pytest.mark.soak
@pytest.mark.parametrize("number", [0, 1])
def test_a_worker_that_hangs_fires(watched: Watched, number: int) -> None:
    """Whichever of them Prometheus is connected to."""
    worker = watched.server.workers()[number]
    worker.send_signal(signal.SIGSTOP)
    check_fires_and_stops(watched, "QueenWorkerSilent", lambda: None, lambda: worker.send_signal(signal.SIGCONT))


def test_a_spool_that_fills_fires_until_it_is_drained(watched: Watched) -> None:
    maintain(watched.server, True)
    check_fires_and_stops(
        watched,
        "QueenSpoolFilling",
        lambda: watched.server.push("orders", 1),
        lambda: maintain(watched.server, False),
    )


def maintain(server: Server, enabled: bool) -> None:
    server.post("/api/v1/system/maintenance", {"enabled": enabled})


@pytest.mark.soak
def test_timers_that_do_not_fire_fire_their_alert(watched: Watched) -> None:
    timer = {"op": "schedule", "queue": "reminders", "timerKey": "late", "payload": "MQ==", "delayMs": 2000}
    watched.server.post("/api/v1/timers", {"operations": [timer]})
    maintain(watched.server, True)
    check_fires_and_stops(watched, "QueenTimersLate", lambda: None, lambda: maintain(watched.server, False))


@pytest.mark.soak
def test_locks_that_are_lost_fire(watched: Watched) -> None:
    check_fires_and_stops(watched, "QueenLocksLost", lambda: lose_lock(watched.server))


@pytest.mark.soak
def test_ephemeral_queues_that_are_full_fire(watched: Watched) -> None:
    check_fires_and_stops(watched, "QueenEphemeralQueueFull", lambda: overfill(watched.server))


@pytest.mark.soak
def test_a_spool_that_is_not_drained_fires(watched: Watched) -> None:
    server = watched.server
    maintain(server, True)
    server.push("orders", 1)
    with server.locked("queen.segments"):
        maintain(server, False)
        check_fires_and_stops(watched, "QueenSpoolNotDraining", lambda: None, server.unlock)


@pytest.mark.soak
def test_buffered_items_that_cannot_be_stored_fire(watched: Watched) -> None:
    with watched.server.locked("queen.topic_items"):
        enqueue(watched.server, "held", 1)
        check_fires_and_stops(watched, "QueenTopicBreakerOpen", lambda: None, watched.server.unlock)


@pytest.mark.soak
def test_a_spool_that_cannot_be_written_to_fires(watched: Watched) -> None:
    server = watched.server

    def push() -> None:
        with suppress(urllib.error.HTTPError):
            server.push("orders", 1)

    maintain(server, True)
    try:
        with read_only(server.spool) as mend:
            # Nothing is pushed once it is mended: the server has to find out by itself.
            check_fires_and_stops(watched, "QueenSpoolUnwritable", push, mend)
    finally:
        maintain(server, False)


@contextmanager
def read_only(directory: Path) -> Iterator[Callable[[], None]]:
    """Allow no new file in a directory or those below it, until the function is called."""
    with ExitStack() as allowed:
        if os.geteuid() == 0:
            # A mode does not stop root.
            try:
                subprocess.run(["mount", "--bind", directory, directory], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                pytest.skip("root, whom no mode stops, cannot mount a directory here")
            allowed.callback(lambda: subprocess.run(["umount", "--lazy", directory], check=True))
            subprocess.run(["mount", "-o", "remount,bind,ro", directory], check=True)
        else:
            for each in (directory, *(path for path in directory.iterdir() if path.is_dir())):
                allowed.callback(each.chmod, 0o700)
                each.chmod(0o500)
        yield allowed.close


@pytest.mark.soak
def test_records_that_postgresql_refuses_fire(watched: Watched) -> None:
    server = watched.server
    server.push("refused", 1)
    ((partition,),) = server.sql(
        "SELECT p.id FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = 'refused'"
    )
    server.sql(f"ALTER TABLE queen.segments ADD CONSTRAINT refuse CHECK (partition_id <> {partition}) NOT VALID")
    maintain(server, True)
    server.push("refused", 1)
    maintain(server, False)
    block_until(lambda: "QueenSpoolRecordsRefused" in watched.prometheus.firing(), "QueenSpoolRecordsRefused fires")
    server.sql("ALTER TABLE queen.segments DROP CONSTRAINT refuse")
    block_until(lambda: "QueenSpoolRecordsRefused" not in watched.prometheus.firing(), "QueenSpoolRecordsRefused stops")


@pytest.mark.soak
def test_a_spool_file_that_is_damaged_fires(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    maintain(server, True)
    server.push("orders", 3)
    server.stop()
    for file in server.spool.glob("*/*.buf"):
        content = bytearray(file.read_bytes())
        content[-20] ^= 255
        file.write_bytes(content)
    server.start()
    block_until(lambda: prometheus.query("queen_spool_damaged_total"), "Prometheus has seen it started")
    maintain(server, False)
    check_fires_and_stops(watched, "QueenSpoolDamaged", lambda: None)


@pytest.mark.soak
def test_duplicates_that_are_looked_up_fire(watched: Watched) -> None:
    items = [{"queue": "again", "payload": 1, "transactionId": "the same"}]
    check_fires_and_stops(
        watched, "QueenDedupSearchesDatabase", lambda: watched.server.post("/api/v1/push", {"items": items})
    )


@pytest.mark.soak
def test_more_queues_than_are_shown_fire(watched: Watched) -> None:
    server = watched.server
    names = [f"many-{number}" for number in range(MOST_QUEUES)]

    def delete() -> None:
        for name in names:
            server.delete(f"/api/v1/resources/queues/{name}")

    server.post("/api/v1/push", {"items": [{"queue": name, "payload": 1} for name in names]})
    check_fires_and_stops(watched, "QueenMetricsTruncated", lambda: None, delete)


@pytest.mark.soak
def test_pipelines_that_fail_or_fall_silent_fire(watched: Watched) -> None:
    """What a pipeline writes about itself, as it does."""
    directory = watched.server.data / "pipelines" / "leads"
    directory.mkdir(parents=True)
    directory.parent.chmod(0o755)

    def report(state: PipelineState) -> None:
        now = time.time()
        status = PipelineStatus(
            name="leads", state=state, pid=1, file="leads.py", master="local", started_at=now, updated_at=now
        )
        write_status(directory, status)
        (directory / STATUS_FILE).chmod(0o644)

    running = partial(report, PipelineState.RUNNING)
    running()
    check_fires_and_stops(watched, "QueenPipelineSilent", lambda: None, running)
    report(PipelineState.FAILED)
    check_fires_and_stops(watched, "QueenPipelineFailed", lambda: None, running)
    report(PipelineState.DONE)


def test_a_server_that_is_down_fires_until_it_is_back(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus
    down = {"QueenServerDown", "QueenNoServer"}
    server.stop()
    block_until(lambda: down <= set(prometheus.firing()), "QueenServerDown fires")
    server.start()
    block_until(lambda: not down & set(prometheus.firing()), "QueenServerDown stops")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_server_that_restarts_again_and_again_fires(watched: Watched) -> None:
    server, prometheus = watched.server, watched.prometheus

    def fires() -> bool:
        return "QueenServerRestarting" in prometheus.firing()

    for _ in range(3):
        server.stop()
        started = f"queen_start_time_seconds > {time.time()}"
        server.start()
        block_until(partial(has_data, prometheus, started), "Prometheus has seen it started")
    block_until(fires, "QueenServerRestarting fires")
    block_until(lambda: not fires(), "QueenServerRestarting stops", RESTARTS_SECONDS + 100)


def test_every_alert_is_tried_at_its_fault() -> None:
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    tried = set(re.findall(r"Queen[A-Z][A-Za-z]+", Path(__file__).read_text().partition("def test_lag_that_grows")[2]))
    assert tried == alerts
