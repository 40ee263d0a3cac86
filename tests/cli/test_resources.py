"""Commands that concern queues, partitions, groups, topics, streams and the server."""

from __future__ import annotations

from pathlib import Path

from queen.client.sync import QueenSync
from tests.cli.conftest import Cli, Served
from tests.support.ageing import block_until


def test_ping_version_metrics_and_analytics(cli: Cli, server: Served) -> None:
    (row,) = cli("ping").json
    assert (row["status"], row["database"], row["server"]) == ("healthy", "connected", server.url)
    assert cli("ping", "-o", "table").out.splitlines()[0].split() == ["STATUS", "DATABASE", "VERSION", "LATENCY"]
    assert "status healthy, database connected" in cli("version").out
    assert cli("version", "--short").out.startswith("queen ")
    assert cli("--version").out.startswith("queen ")
    assert cli("metrics").json["uptime"] > 0
    assert "# TYPE queen_uptime_seconds gauge" in cli("metrics", "--prometheus").out
    assert cli("a", "postgres").json["database"] == cli("analytics", "postgres").json["database"]
    assert cli("analytics", "system", "--from", "whenever").code == 1


def test_analytics_show_what_was_done(cli: Cli, name: str) -> None:
    cli("push", name, stdin="1\n2\n3")
    cli("pop", name, "--auto-ack", "-n", 2)
    cli("pop", name, "--cg", "none", "--partition", "empty", "--timeout", "300ms")
    since = ("--from", "2h ago")
    assert sum(point["messages"] for point in cli("analytics", "overview", *since).json["dataPoints"]) >= 3
    for view in (("analytics", "status"), ("analytics", "worker"), ("analytics", "system"), ("analytics", "retention")):
        assert cli(*view, *since).json["timeRange"]["from"] < cli(*view, *since).json["timeRange"]["to"], view
    own = (*since, "--queue", name)
    block_until(lambda: bool(cli("analytics", "queue-ops", *own).json["series"]), "what was counted is stored")
    (row,) = cli("analytics", "queue-ops", *own).json["series"]
    assert (row["queueName"], row["pushMessages"], row["popMessages"]) == (name, 3, 2)
    assert [row["popCount"] for row in cli("analytics", "queue-lag", *own).json] == [2]
    assert {row["queueName"] for row in cli("analytics", "queue-parked", *own).json["series"]} <= {name}


def test_namespaces_and_tasks_of_queues_are_listed(cli: Cli, name: str) -> None:
    cli("queue", "configure", f"{name}-a", "--namespace", name, "--task", f"{name}-t")
    cli("queue", "configure", f"{name}-b", "--namespace", name)
    cli("push", f"{name}-a", "--data", "1")
    assert cli("namespace", "list", "-o", "table").out.splitlines()[0].split() == ["NAMESPACE", "QUEUES", "PENDING"]
    (row,) = [row for row in cli("namespace", "list").json if row["namespace"] == name]
    assert (row["queues"], row["tasks"], row["messages"]["pending"]) == (2, 1, 1)
    (row,) = [row for row in cli("task", "list").json if row["task"] == f"{name}-t"]
    assert row["queues"] == 1
    assert name in cli("ns", "ls", "-o", "name").out.splitlines()


def test_options_of_a_queue_can_be_zero_and_those_not_named_stay(cli: Cli, name: str) -> None:
    ran = cli(
        "queue", "configure", name, "--retry-limit", 0, "--lease-time", 60, "--namespace", "billing", "--task", "t"
    )
    assert ran.out == f'configured "{name}"\n'
    options = cli("queue", "configure", name, "--priority", 7, "--encrypt", "-o", "json").json["options"]
    assert (options["retryLimit"], options["leaseTime"], options["priority"]) == (0, 60, 7)
    assert options["encryptionEnabled"] is True
    found = cli("queue", "configure", name, "--no-encrypt", "--retention", 3600, "-o", "json").json
    assert (found["namespace"], found["task"], found["options"]["retentionEnabled"]) == ("billing", "t", True)
    described = cli("queue", "describe", name).json
    assert described["options"]["ttl"] is None
    assert described["options"]["retryLimit"] == 0
    assert cli("queue", "configure", name, "--reset", "-o", "json").json["options"]["retryLimit"] == 3


def test_queues_are_listed_without_empty_columns(cli: Cli, name: str) -> None:
    cli("queue", "configure", name, "--namespace", name, "--task", "ingest", "--max-size", 5)
    cli("push", name, "--data", "1")
    lines = cli("queue", "list", "--namespace", name, "-o", "wide").out.splitlines()
    headings = "NAME NAMESPACE TASK PARTITIONS PENDING PRIORITY LEASE PAUSED RETRY MAXSIZE ENCRYPTED CREATED"
    assert lines[0].split() == headings.split()
    assert lines[1].split()[:10] == [name, name, "ingest", "1", "1", "0", "300s", "no", "3", "5"]
    assert cli("q", "ls", "--task", "none").json == []
    cli("push", f"{name}-2", stdin="1\n2")
    both = [name, f"{name}-2"]
    for flags, names in ((["--sort", "name"], both), (["--sort", "pending"], both[::-1]), (["--reverse"], both)):
        found = cli("queue", "list", "--search", name.upper(), *flags).json
        assert [row["name"] for row in found] == names
        assert cli("queue", "list", "--search", name, *flags, "-n", 1, "--offset", 1).json == found[1:]
    assert cli("queue", "list", "--sort", "size").code == 1
    assert len(cli("queue", "list", "-n", 1).json) == 1
    assert (
        cli("queue", "list", "--namespace", name, "-o", "csv")
        .out.splitlines()[1]
        .startswith(f"{name},{name},ingest,1,1,")
    )
    assert cli("queue", "list", "--namespace", name, "--no-headers", "-o", "table").out.split()[0] == name
    assert cli("queue", "stats", "--namespace", name).json["queues"][0]["name"] == name
    (row,) = [row for row in cli("ns", "ls").json if row["namespace"] == name]
    assert (row["queues"], row["tasks"]) == (1, 1)
    assert "ingest" in [row["task"] for row in cli("task", "list").json]


def test_status_and_lag(cli: Cli, name: str) -> None:
    cli("push", name, "--partition", "a", stdin="1\n2\n3")
    cli("pop", name, "--cg", "g", "-n", 1, "--auto-ack")
    line = cli("status", name, "-o", "table").out.splitlines()
    assert line[0].split() == [
        "QUEUE",
        "NAMESPACE",
        "PENDING",
        "PROCESSING",
        "COMPLETED",
        "FAILED",
        "DLQ",
        "LAG",
        "PARTITIONS",
    ]
    assert line[1].split()[:7] == [name, name, "2", "0", "1", "0", "0"]
    assert [row["name"] for row in cli("status", name, "--partitions").json] == ["a"]
    assert cli("status", "--partitions").code == 1
    assert name in [row["name"] for row in cli("status", "--namespace", name).json]
    assert cli("status", "no-such-queue").code == 2
    (row,) = [row for row in cli("lag").json if row["queueName"] == name]
    assert (row["name"], row["totalLag"]) == ("g", 2)
    lines = cli("group", "lag", "g", "-o", "wide").out.splitlines()
    assert lines[0].split() == ["CG", "QUEUE", "MESSAGES", "LAG", "STATE", "PAUSED", "PARTITIONS", "SUBSCRIBED"]
    assert lines[1].split()[-1] == "default"
    assert cli("lag", "--min-seconds", 100000).json == []


def test_partitions_are_listed_described_and_skipped(cli: Cli, name: str) -> None:
    cli("push", name, "--partition", "a", stdin="1\n2\n3")
    cli("pop", name, "--cg", "g", "-n", 1, "--auto-ack")
    lines = cli("partition", "list", name, "-o", "wide").out.splitlines()
    assert lines[1].split()[:8] == ["a", "2", "0", "1", "0", "0", "3", "3"]
    described = cli("p", "describe", name, "a").json
    assert described["offsets"] == {"firstOffset": 0, "nextOffset": 3}
    assert len(described["messages"]) == 3
    assert "it has a" in cli("partition", "describe", name, "z").err
    assert cli("partition", "seek", name, "a", "--cg", "g", "--to", "1h ago", "--offset", 1).code == 1
    dry = cli("partition", "seek", name, "a", "--cg", "g", "--to", "1h ago", "--dry-run", "-o", "json").json
    assert (dry["redelivered"], dry["skipped"]) == (1, 0)
    assert cli("partition", "seek", name, "a", "--cg", "g", "--offset", 2).out == "seek cg=g partition=a to=offset 2\n"
    assert [row["data"] for row in cli("pop", name, "--cg", "g", "-n", 9).lines] == [3]
    assert cli("group", "release", "g", name, "a", "--lease", "00000000-0000-0000-0000-000000000000").code == 2
    assert cli("group", "release", "g", name, "a").out == "released cg=g partition=a available=1\n"
    assert cli("group", "release", "g", name, "a").code == 2
    assert cli("partition", "seek", name, "a", "--cg", "g").out == "seek cg=g partition=a to=end\n"
    assert cli("pop", name, "--cg", "g", "--no-wait").code == 4
    assert cli("partition", "seek", name, "z", "--cg", "g").code == 2


def test_what_is_paused_gives_nothing_until_it_is_resumed(cli: Cli, name: str) -> None:
    cli("push", name, stdin="1")
    cli("push", f"{name}-2", stdin="1")
    cli("pop", f"{name}-2", "--cg", name)
    cli("topic", "enqueue", name, "jobs", "--data", "1")
    for pause, resume, take in (
        (("queue", "pause", name), ("queue", "resume", name), ("pop", name, "--no-wait")),
        (("group", "pause", name, name), ("group", "resume", name, name), ("pop", name, "--cg", name, "--no-wait")),
        (
            ("topic", "pause", name, "jobs"),
            ("topic", "resume", name, "jobs"),
            ("topic", "dequeue", name, "jobs", "--no-wait"),
        ),
    ):
        assert cli(*pause).out.startswith("paused ")
        assert cli(*pause).out.endswith(", as it was\n")
        assert cli(*take).code == 4
        assert cli(*resume).out.startswith("resumed ")
        assert cli(*resume).out.endswith(", which was not paused\n")
        assert cli(*take).code == 0
    assert cli("queue", "pause", "nobody").code == 2


def test_groups_are_moved_and_deleted(cli: Cli, name: str) -> None:
    cli("push", name, stdin="1\n2")
    cli("pop", name, "--cg", name, "-n", 2, "--auto-ack")
    assert [row["queueName"] for row in cli("group", "list", "--queue", name).json] == [name]
    assert cli("cg", "describe", name).json[name]["partitions"][0]["offsetLag"] == 0
    assert cli("cg", "describe", name, "-o", "table").out.splitlines()[1].split()[:3] == [name, "Default", "0"]
    assert cli("cg", "describe", name, "-o", "name").out == f"{name}\n"
    assert cli("group", "describe", "nobody").code == 2
    assert cli("group", "seek", name, name, "--to", "beginning", "--dry-run").out.startswith("dry run: seek")
    assert (
        cli("group", "seek", name, name, "--to", "beginning").out
        == f"seek cg={name} queue={name} to=beginning partitions=1\n"
    )
    assert len(cli("pop", name, "--cg", name, "-n", 5, "--auto-ack").lines) == 2
    assert cli("group", "subscribe", name, "--from", "1h ago").code == 0
    assert cli("group", "delete", name).code == 1
    assert (
        cli("group", "delete", name, "--queue", name, "--yes").out == f"deleted cg={name} queue={name} partitions=1\n"
    )
    assert cli("group", "rm", name, "--metadata", "--yes").code == 4
    assert cli("group", "refresh-stats").out == "refreshed\n"


def test_a_queue_is_exported_imported_cleared_and_deleted(cli: Cli, name: str, tmp_path: Path) -> None:
    cli("push", name, "--partition", "a", stdin="1\n2")
    cli("push", name, "--partition", "b", "--data", '{"x": "é"}', "--trace-id", "5b7d0c1e-2f57-4a6e-9d0e-0a4c6a1c9f11")
    file = tmp_path / "messages.ndjson"
    assert cli("queue", "export", name, "-f", file).err == f"exported 3 messages of {name}\n"
    copy = f"{name}-copy"
    assert cli("queue", "import", copy, "-f", file, "--batch", 2).out == "queued=3 duplicate=0 failed=0\n"
    assert cli("queue", "import", copy, "-f", file).out == "queued=0 duplicate=3 failed=0\n"
    keys = ("partition", "transactionId", "traceId", "data", "offset")
    there, here = cli("queue", "export", name).lines, cli("queue", "export", copy).lines
    assert [[one[key] for key in keys] for one in there] == [[one[key] for key in keys] for one in here]
    assert len(cli("queue", "export", name, "--partition", "a", "--from", "1h ago", "--to", "now").lines) == 2
    assert cli("queue", "export", name, "--to", "1h ago").code == 4
    assert cli("queue", "import", copy, stdin='{"a": 1}').code == 1
    assert cli("queue", "import", copy).code == 4
    assert cli("queue", "clear", name).code == 1
    assert cli("queue", "clear", name, "--partition", "a", "--yes").out == f'cleared "{name}": 2 messages\n'
    assert cli("queue", "delete", name, "--yes").out == f'deleted "{name}"\n'
    assert cli("queue", "delete", name, "--yes").code == 4
    missing = cli("queue", "describe", name)
    assert (missing.code, missing.out) == (2, "")
    assert missing.err == "queen: Queue not found; queen queue list shows what there is\n"


def test_items_of_a_topic(cli: Cli, name: str) -> None:
    first = cli("topic", "enqueue", name, "jobs", "--data", '{"n": 1}', "--priority", 5).out.strip()
    (second,) = cli("topic", "enqueue", name, "jobs", "--data", '{"n": 2}', "--key", "k", "-o", "json").json
    assert cli("topic", "enqueue", name, "jobs", "--data", "3", "--key", "k").out.strip() == str(second)
    cli("topic", "enqueue", name, "jobs", "--delay", "1h", "--batch", 2, stdin="4\n5\n6")
    (row,) = cli("topic", "list", name).json
    assert (row["ready"], row["delayed"]) == (2, 3)
    assert cli("topic", "list", name, "-o", "wide").out.splitlines()[1].split()[:5] == ["jobs", "2", "3", "0", "0"]
    assert len(cli("topic", "peek", name, "jobs").json) == 2
    assert cli("topic", "peek", name, "jobs", "--delayed", "-o", "table").out.count("\n") == 6
    taken = cli("topic", "dequeue", name, "jobs", "-n", 9, "--lease", 60)
    assert [item["data"] for item in taken.lines] == [{"n": 2}, {"n": 1}]
    assert cli("topic", "dequeue", name, "jobs", "--no-wait").code == 4
    assert cli("topic", "extend", name, "jobs", first, "--seconds", 90).out == "ok=1 failed=0\n"
    assert cli("topic", "release", name, "jobs", first).code == 0
    assert cli("topic", "ack", name, "jobs", "--batch", "-", stdin=taken.out.splitlines()[0]).out == "ok=1 failed=0\n"
    assert cli("topic", "ack", name, "jobs", second).code == 2
    assert cli("topic", "ack", name, "jobs").code == 1
    assert len(cli("topic", "dequeue", name, "jobs", "--ack").lines) == 1
    assert cli("topic", "enqueue", name, "jobs").code == 4
    assert cli("topic", "enqueue", name, "jobs", "--delay", "1s", "--deliver-after", "now").code == 1
    assert cli("topic", "enqueue", name, "jobs", "--key", "k", stdin="1").code == 1
    assert cli("topic", "purge", name, "jobs", "--yes").out == f'purged "{name}/jobs": 3 items\n'
    assert cli("topic", "delete", name, "jobs", "--yes").code == 0
    assert cli("topic", "delete", name, "jobs", "--yes").code == 4
    assert cli("topic", "describe", name, "jobs").code == 2


def test_dead_letters_of_a_topic(cli: Cli, name: str) -> None:
    assert cli("topic", "configure", name, "jobs", "--max-retries", 0, "--ttl", "1d").code == 0
    options = cli("topic", "configure", name, "jobs", "--lease", 45, "-o", "json").json["options"]
    assert (options["max_retries"], options["lease_seconds"], options["ttl_seconds"]) == (0, 45, 86400)
    assert cli("topic", "configure", name, "jobs", "--ttl", "none", "-o", "json").json["options"]["ttl_seconds"] is None
    cli("topic", "enqueue", name, "jobs", stdin="1\n2\n3")
    taken = cli("topic", "dequeue", name, "jobs", "-n", 3)
    assert cli("topic", "nack", name, "jobs", "--batch", "-", "--error", "card refused", stdin=taken.out).code == 0
    letters = cli("topic", "dlq", "list", name, "jobs").json
    assert [letter["last_error"] for letter in letters] == ["card refused"] * 3
    assert cli("topic", "dlq", "redrive", name, "jobs", letters[0]["id"]).out == "ok=1 failed=0\n"
    assert cli("topic", "dlq", "purge", name, "jobs", letters[1]["id"], "--yes").out == "ok=1 failed=0\n"
    assert cli("topic", "dlq", "redrive", name, "jobs").code == 1
    assert cli("topic", "dlq", "redrive", name, "jobs", "--all").out == "ok=1 failed=0\n"
    assert cli("topic", "dlq", "purge", name, "jobs", "--all", "--yes").code == 4
    assert cli("topic", "describe", name, "jobs").json["ready"] == 2


def test_quotas_and_write_modes(cli: Cli, name: str) -> None:
    assert cli("topic", "quota", "set", name, 2).out == f'quota of "{name}" is 2 a minute\n'
    assert {"namespace": name, "per_minute": 2} in cli("topic", "quota", "list").json
    over = cli("topic", "enqueue", name, "jobs", stdin="1\n2\n3")
    assert over.code == 2
    assert "may enqueue 2 items" in over.err
    assert cli("topic", "quota", "unset", name).code == 0
    assert name not in [row["namespace"] for row in cli("topic", "quota", "list").json]
    assert cli("topic", "mode", "set", name, "buffered").code == 0
    assert {"namespace": name, "mode": "buffered"} in cli("topic", "mode", "list").json
    assert cli("topic", "mode", "set", name, "default").code == 0
    assert cli("topic", "mode", "set", name, "fast").code == 1


def test_streaming_queries_are_registered_and_their_state_is_shown(cli: Cli, name: str) -> None:
    cli("push", name, "--partition", "a", "--data", "1")
    registered = cli("stream", "register", name, "--source", name, "--hash", "v1")
    assert registered.out.startswith(f"registered {name} ")
    (listed,) = [row for row in cli("stream", "list").json if row["name"] == name]
    assert (listed["query_id"], listed["source_queue"]) == (registered.out.split()[-1], name)
    assert cli("streams", "ls", "-o", "wide").out.split()[:4] == ["NAME", "SOURCE", "SINK", "UPDATED"]
    assert cli("stream", "register", name, "--source", name, "--hash", "v1").out.startswith("found ")
    conflict = cli("stream", "register", name, "--source", name, "--hash", "v2")
    assert conflict.code == 2
    assert "--reset" in conflict.err
    assert cli("stream", "state", name).json == []
    assert cli("stream", "state", name, "--prefix", "w", "--key", "k", "--ripe", "now", "-o", "table").code == 0
    assert cli("stream", "state", "no-such-query").code == 2
    assert cli("stream", "delete", name, "--yes").out.strip() == f"deleted {name} rows=0"
    assert cli("stream", "rm", name, "--yes").code == 2
    assert cli("stream", "register", name, "--source", name, "--hash", "v2").out.startswith("registered ")
    assert cli("stream", "register", name, "--source", name, "--hash", "v2", "--reset").code == 0


def test_keys_are_written_listed_and_deleted(cli: Cli, name: str) -> None:
    assert cli("kv", "get", name, "k").code == 4
    assert cli("kv", "put", name, "k", '{"a": 1}', "--expect", 0).out.startswith(f"put {name} k version=")
    refused = cli("kv", "put", name, "k", "2", "--expect", 0)
    assert refused.code == 2
    assert "its version is" in refused.err
    assert cli("kv", "get", name, "k").json == {"a": 1}
    entry = cli("kv", "get", name, "k", "-o", "json").json
    assert cli("kv", "set", name, "k", "[]", "--expect", entry["version"], "--ttl", "10m").code == 0
    assert [cli("kv", "incr", name, "n", "--by", by).json for by in (1, 5, -2)] == [1, 6, 4]
    assert "holds no number" in cli("kv", "incr", name, "k").err
    assert "would not fit into 63 bits" in cli("kv", "incr", name, "n", "--by", 2**63 - 1).err
    assert cli("kv", "put", name, "k", "{").code == 1
    lines = cli("kv", "list", name, "--prefix", "k", "-o", "table").out.splitlines()
    assert lines[0].split() == ["KEY", "VALUE", "VERSION", "EXPIRES"]
    assert [line.split()[:2] for line in lines[1:]] == [["k", "[]"]]
    assert "-" not in lines[1].split()
    assert {"namespace": name, "keys": 2} in cli("kv", "list", "-n", 1000).json
    assert cli("kv", "list", name, "-o", "name").out == "k\nn\n"
    assert cli("kv", "delete", name, "k", "--expect", 1).code == 4
    assert cli("kv", "rm", name, "k").out == f"deleted {name} k\n"
    assert cli("kv", "rm", name, "n", "-o", "json").json == {"message": f"deleted {name} n"}
    assert cli("kv", "rm", name, "k").code == 4


def test_locks_and_timers_are_listed_scheduled_and_cancelled(cli: Cli, server: Served, name: str) -> None:
    with QueenSync(server.url) as queen, queen.lock(name, ttl=30):
        lines = cli("lock", "list", "--prefix", name, "-o", "wide").out.splitlines()
    assert lines[0].split() == ["NAME", "OWNER", "EXPIRES", "SINCE"]
    assert lines[1].startswith(name)
    assert "-" not in lines[1].split()
    assert cli("locks", "ls", "--prefix", name).json == []
    assert cli("timer", "schedule", name, "later", '{"n": 1}', "--in", "1h").out == f"scheduled {name} later in 1h\n"
    assert cli("timer", "schedule", name, "soon", '{"n": 2}', "--in", "1ms", "--partition", "p").code == 0
    (message,) = cli("pop", name, "--timeout", "30s").lines
    assert (message["data"], message["partition"]) == ({"n": 2}, "p")
    lines = cli("timer", "list", "--queue", name, "-o", "wide").out.splitlines()
    assert [line.split()[:2] for line in lines] == [["KEY", "QUEUE"], ["later", name]]
    assert cli("timer", "cancel", name, "later").out == f"cancelled {name} later\n"
    assert cli("timer", "cancel", name, "later").code == 4


def test_maintenance_is_switched_on_and_off(cli: Cli) -> None:
    assert cli("maintenance", "on").code == 1
    assert cli("maintenance", "on", "--pop", "--yes").out == "pop-maintenance on\n"
    assert cli("maint", "get", "--pop").json["popMaintenanceMode"] is True
    assert "pop maintenance is on" in cli("doctor").out
    assert cli("maintenance", "off", "--pop").out == "pop-maintenance off\n"
    assert cli("maintenance", "get").json["maintenanceMode"] is False


def test_bench_prints_percentiles(cli: Cli, name: str) -> None:
    bench = ("bench", "--queue", name, "--total", 300, "--batch", 50, "--producers", 2, "--consumers", 2)
    rows = cli(*bench, "-o", "json").json
    assert [(row["phase"], row["messages"]) for row in rows] == [("PUSH", 300), ("POP", 300), ("RESIDENCY", 300)]
    assert rows[0]["latencyMs"]["p50"] <= rows[0]["latencyMs"]["p99"] <= rows[0]["latencyMs"]["max"]
    table = cli(*bench, "--skip-pop", "--auto-delete", "-o", "table").out.splitlines()
    assert table[0].split() == ["PHASE", "MESSAGES", "SECONDS", "MSG/S", "MB/S", "P50", "P90", "P95", "P99", "MAX"]
    assert len(table) == 2
    assert cli("queue", "describe", name).code == 2


def test_bench_counts_no_time_in_which_consumers_found_nothing(cli: Cli, name: str) -> None:
    """Three of four consumers wait for half a second while the first takes all there is."""
    few = ("bench", "--queue", name, "--total", 10, "--batch", 10, "--producers", 1, "--consumers", 4)
    rows = {row["phase"]: row for row in cli(*few, "-o", "json").json}
    assert rows["POP"]["seconds"] <= rows["POP"]["latencyMs"]["max"] / 1000 + 0.1
    assert cli("bench", "--payload-size", 10**20).code == 1


def test_top_prints_one_view_where_no_terminal_is(cli: Cli, name: str) -> None:
    cli("push", name, stdin="1\n2")
    (row,) = [row for row in cli("top", "--interval", "100ms", "-n", 1000).json if row["name"] == name]
    assert (row["pending"], row["in"]) == (2, 0)
    assert cli("top", "--sort", "luck").code == 1
