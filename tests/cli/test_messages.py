"""Commands that concern messages: push, pop, ack, tx, tail, messages, dlq, traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tests.cli.conftest import Cli


def dead(cli: Cli, queue: str, *payloads: str, group: str = "workers") -> list[dict[str, Any]]:
    """Push messages that become dead letters of a group at once."""
    cli("queue", "configure", queue, "--retry-limit", 0)
    cli("push", queue, stdin="\n".join(payloads))
    popped = cli("pop", queue, "--cg", group, "-n", len(payloads))
    ran = cli("ack", "--batch", "-", "--cg", group, "--error", "no such customer", stdin=popped.out)
    assert ran.out == f"ok={len(payloads)} failed=0\n"
    return popped.lines


def test_push_counts_what_became_of_messages(cli: Cli, name: str, tmp_path: Path) -> None:
    file = tmp_path / "orders.ndjson"
    file.write_text('{"n": 1, "at": {"zone": "eu"}}\n\n{"n": 2, "at": {"zone": "us"}}\n')
    assert cli("push", name, "-f", file, "--partition-key", "at.zone").out == "queued=2 duplicate=0 failed=0\n"
    assert cli("push", name, "--data", "null", "--transaction-id", "t-1").out == "queued=1 duplicate=0 failed=0\n"
    assert cli("push", name, "--data", "{}", "--transaction-id", "t-1", "-o", "json").json["duplicate"] == 1
    wrapped = '{"data": [1], "partition": "eu", "transactionId": "w-1"}'
    assert cli("push", name, "--wrapped", stdin=wrapped).out == "queued=1 duplicate=0 failed=0\n"
    found = cli("queue", "export", name).lines
    assert [(one["partition"], one["data"]) for one in found] == [
        ("Default", None),
        ("eu", {"n": 1, "at": {"zone": "eu"}}),
        ("eu", [1]),
        ("us", {"n": 2, "at": {"zone": "us"}}),
    ]
    assert found[2]["transactionId"] == "w-1"


def test_push_says_what_is_wrong_with_its_input(cli: Cli, name: str) -> None:
    assert cli("push", name).code == 4
    bad = cli("push", name, stdin='{"a": 1}\n{"a": \n')
    assert bad.code == 1
    assert "line 2 of stdin is not JSON" in bad.err
    half = cli("push", name, "--batch", 2, stdin="1\n2\n3\n{")
    assert half.err.endswith("; 2 messages were pushed before that\n")
    assert cli("topic", "enqueue", name, "t", "--batch", 1, stdin="1\n{").err.endswith(
        "; 1 items were enqueued before that\n"
    )
    assert cli("queue", "delete", name, "--yes").code == 0
    assert cli("push", name, "--partition-key", "a.b", stdin='{"a": 1}').code == 1
    assert cli("push", name, "--wrapped", stdin='{"a": 1}').code == 1
    assert cli("push", name, "--data", "1", "--file", "x").code == 1
    assert "cannot be read" in cli("push", name, "-f", "/nonexistent").err
    dry = cli("push", name, "--dry-run", "--data", "1")
    assert dry.lines[0]["payload"] == 1
    assert "would push 1 messages" in dry.err
    assert cli("queue", "describe", name).code == 2


def test_files_that_are_not_utf8_are_refused_and_a_byte_order_mark_is_skipped(
    cli: Cli, name: str, tmp_path: Path
) -> None:
    bad, marked = tmp_path / "bad", tmp_path / "marked"
    bad.write_bytes(b"1\n\xff\xfe\n")
    marked.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n{"n": 2}\r\n')
    for arguments, where in (
        (("push", name, "-f"), f"line 2 of {bad}"),
        (("queue", "import", name, "-f"), "line 1 has no data"),
        (("topic", "enqueue", name, "t", "-f"), f"line 2 of {bad}"),
        (("ack", "--batch"), "line 1 has no transactionId"),
        (("tx", "-f"), str(bad)),
        (("apply", "-f"), str(bad)),
    ):
        ran = cli(*arguments, bad)
        assert (ran.code, ran.err.count("\n")) == (1, 1), ran.err
        assert ran.err.startswith(f"queen: {where}")
    assert cli("push", name, "-f", marked).code == 0
    assert [message["data"] for message in cli("pop", name, "-n", 2).lines] == [{"n": 1}, {"n": 2}]


def test_what_pop_prints_is_what_ack_reads(cli: Cli, name: str) -> None:
    cli("push", name, stdin="1\n2\n3\n")
    popped = cli("pop", name, "-n", 2)
    assert [message["data"] for message in popped.lines] == [1, 2]
    assert set(popped.lines[0]) == {
        "queue", "partition", "transactionId", "partitionId", "createdAt", "data", "leaseId"
    }  # fmt: skip
    assert cli("pop", name, "--no-wait").code == 4
    assert cli("ack", "--batch", "-", stdin=popped.out).out == "ok=2 failed=0\n"
    again = cli("ack", "--batch", "-", stdin=popped.out.replace(popped.lines[0]["leaseId"], "0" * 8))
    assert again.code == 2
    (third,) = cli("pop", name, "--no-wait").lines
    lease = cli("lease", "extend", third["leaseId"], "--seconds", 600)
    assert lease.out.startswith(f"renewed {third['leaseId']} -> 2")
    place = ("--partition-id", third["partitionId"], "--lease-id", third["leaseId"])
    assert cli("ack", third["transactionId"], *place).out == "ack ok\n"
    assert cli("ack", "nothing", "--partition-id", third["partitionId"]).code == 2
    assert cli("ack", third["transactionId"]).code == 1
    assert cli("ack", "--batch", "-", stdin='{"a": 1}').code == 1
    assert cli("ack", "--batch", "-").code == 4
    assert cli("lease", "extend", "00000000-0000-0000-0000-000000000000").code == 2


def test_pop_by_partition_namespace_group_and_time(cli: Cli, name: str) -> None:
    cli("queue", "configure", name, "--namespace", name)
    cli("push", name, "--partition", "a", stdin="1\n2")
    cli("push", name, "--partition", "b", stdin="3")
    assert [one["data"] for one in cli("pop", name, "--partition", "b", "--auto-ack").lines] == [3]
    popped = cli("pop", "--namespace", name, "-n", 5, "--auto-ack").lines
    assert [(one["queue"], one["data"]) for one in popped] == [(name, 1), (name, 2)]
    assert cli("pop", name, "--cg", "late", "--from-mode", "new", "--no-wait").code == 4
    assert len(cli("pop", name, "--cg", "early", "--since", "1h ago", "-n", 9, "--max-partitions", 5).lines) == 3
    assert cli("pop", name, "--from-mode", "old").code == 1


def test_a_transaction_is_applied_whole_or_not(cli: Cli, name: str, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.json"
    push = {"type": "push", "items": [{"queue": name, "payload": 1}]}
    bundle.write_bytes(msgspec.json.encode({"operations": [push]}))
    assert cli("tx", "-f", bundle, "--dry-run").out == "would apply 1 operations: push\n"
    assert cli("tx", "-f", bundle).out == "transaction committed\n"
    ack = {"type": "ack", "transactionId": "none", "partitionId": "51756565-0000-8000-8000-000000000001"}
    ran = cli("tx", "-f", "-", stdin=msgspec.json.encode({"operations": [push, ack]}).decode())
    assert ran.code == 2
    assert "ACK operation failed" in ran.err
    assert len(cli("queue", "export", name).lines) == 1
    assert cli("tx", "-f", "-", stdin="{}").code == 1


def test_tail_prints_what_is_new_to_its_group(cli: Cli, name: str) -> None:
    cli("push", name, stdin='{"n": 1}\n{"n": 2}\n{"n": 3}')
    assert [one["data"]["n"] for one in cli("tail", name, "--where", "n>1").lines] == [2, 3]
    assert cli("tail", name).code == 4
    assert cli("tail", name, "--cg", "strict", "--where", "n>9").code == 4
    assert [one["data"]["n"] for one in cli("tail", name, "--cg", "other", "-n", 2).lines] == [1, 2]
    assert [one["data"]["n"] for one in cli("tail", name, "--cg", "other", "-f", "--idle-millis", 50).lines] == [3]
    assert cli("tail", name, "-f", "--idle-millis", 50, "--concurrency", 2).code == 4
    assert cli("tail", name, "--from", "yesterday").code == 1
    colored = cli("tail", name, "--cg", "third", "--grep", '"n":3', "--color", "--auto-ack")
    assert colored.out.count("\n") == 1
    assert f"{name}/Default" in colored.out
    assert "\033[" in colored.out


def test_replay_moves_a_group_back(cli: Cli, name: str) -> None:
    cli("push", name, stdin="1\n2")
    assert len(cli("pop", name, "--cg", "g", "-n", 5, "--auto-ack").lines) == 2
    assert cli("replay", name, "--cg", "g", "--to", "beginning", "--dry-run").code == 0
    assert cli("pop", name, "--cg", "g", "--no-wait").code == 4
    assert (
        cli("replay", name, "--cg", "g", "--to", "beginning").out
        == f"replayed cg=g queue={name} to=beginning partitions=1\n"
    )
    assert len(cli("pop", name, "--cg", "g", "-n", 5, "--auto-ack").lines) == 2
    nothing = cli("replay", name, "--cg", "stranger", "--to", "end")
    assert (nothing.code, nothing.out) == (4, "")
    assert f"group 'stranger' has no position on queue '{name}'" in nothing.err


def test_messages_are_listed_found_and_deleted(cli: Cli, name: str) -> None:
    cli("push", name, "--partition", "a", stdin='{"who": "ada"}\n{"who": "bob"}\n{"who": "eve"}')
    (first,) = cli("pop", name, "--cg", "g", "--auto-ack").lines
    listed = cli("messages", "list", "--queue", name, "--cg", "g").json
    assert [one["status"] for one in listed] == ["pending", "pending", "completed"]
    # Also where the newest messages have another status.
    done = cli("messages", "list", "--queue", name, "--cg", "g", "--status", "completed", "-n", 1).json
    assert [one["transactionId"] for one in done] == [first["transactionId"]]
    assert len(cli("messages", "list", "--queue", name, "--offset", 1, "-n", 1).json) == 1
    table = cli("messages", "list", "--queue", name, "-o", "wide").out
    assert table.splitlines()[0].split() == [
        "TX",
        "QUEUE",
        "PARTITION",
        "STATUS",
        "CONSUMED",
        "CREATED",
        "PARTITIONID",
        "PRODUCER",
    ]
    assert cli("messages", "list", "--status", "lost").code == 1
    (found,) = cli("messages", "search", name, "--where", "who=bob", "--from", "1h ago").json
    assert found["data"] == {"who": "bob"}
    assert len(cli("messages", "search", name, "e", "-n", 1).json) == 1
    assert cli("messages", "search", name, "mallory").code == 4
    assert cli("messages", "search", "no-such-queue", "x").code == 2
    place = (found["partitionId"], found["transactionId"])
    assert cli("messages", "get", *place).json["payload"] == {"who": "bob"}
    assert cli("messages", "get", *place, "-o", "jsonpath=.payload.who").out == "bob\n"
    assert cli("messages", "delete", *place).code == 1
    assert cli("messages", "delete", *place, "--yes").out == "deleted\n"
    assert cli("messages", "delete", *place, "--yes").code == 2
    assert cli("messages", "get", *place).code == 2
    assert cli("messages", "retry", first["partitionId"], first["transactionId"]).code == 0
    assert len(cli("queue", "export", name).lines) == 3
    assert cli("messages", "dlq", first["partitionId"], first["transactionId"]).code == 0
    assert len(cli("dlq", "list", "--queue", name).json) == 1


def test_dead_letters_are_listed_and_sent_round_again(cli: Cli, name: str) -> None:
    letters = dead(cli, name, "1", "2", "3")
    listed = cli("dlq", "list", "--queue", name, "-o", "wide").out.splitlines()
    assert listed[0].split() == ["TX", "QUEUE", "PARTITION", "CG", "RETRIES", "ERROR", "FAILED-AT", "PARTITIONID"]
    assert len(listed) == 4
    assert "no such customer" in listed[1]
    assert [one["data"] for one in cli("dlq", "list", "--queue", name, "-n", 1, "--offset", 2).json] == [1]
    assert (
        cli("dlq", "describe", letters[0]["partitionId"], letters[0]["transactionId"]).json["status"] == "dead_letter"
    )
    assert cli("dlq", "list", "--queue", name, "--cg", "strangers").json == []
    (reason,) = cli("dlq", "report", "--queue", name).json
    assert (reason["count"], reason["error"]) == (3, "no such customer")
    assert cli("dlq", "report", "--queue", name, "-o", "table").out.splitlines()[1].split()[:2] == ["3", name]
    assert cli("dlq", "list", "--queue", name, "--to", "1h ago").json == []
    exported = cli("dlq", "export", name)
    assert sorted(one["data"] for one in exported.lines) == [1, 2, 3]
    assert "exported 3 dead letters" in exported.err
    dry = cli("dlq", "redrive", name, "--tx", letters[1]["transactionId"], "--dry-run")
    assert [one["data"] for one in dry.json] == [2]
    assert cli("dlq", "redrive", name, "--tx", letters[1]["transactionId"]).out == "redriven=1 remaining=0\n"
    assert cli("dlq", "redrive", name, "--limit", 1).out == "redriven=1 remaining=1\n"
    assert cli("dlq", "redrive", name).out == "redriven=1 remaining=0\n"
    assert cli("dlq", "redrive", name).code == 4
    assert sorted(one["data"] for one in cli("pop", name, "--cg", "workers", "-n", 9).lines) == [1, 2, 3]
    assert cli("dlq", "redrive", "no-such-queue").code == 2


def test_a_dead_letter_is_edited(cli: Cli, name: str, monkeypatch: Any, tmp_path: Path) -> None:
    letters = dead(cli, name, '{"currency": "EURO"}', "2")
    place = (letters[0]["partitionId"], letters[0]["transactionId"])
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i s/EURO/EUR/ $1\n")
    editor.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(editor))
    monkeypatch.delenv("VISUAL", raising=False)
    assert cli("dlq", "edit", *place).out.startswith("pushed ")
    assert [one["data"] for one in cli("dlq", "list", "--queue", name).json] == [2]
    assert [one["data"] for one in cli("pop", name, "--cg", "workers", "-n", 9).lines] == [{"currency": "EUR"}]
    other = (letters[1]["partitionId"], letters[1]["transactionId"])
    assert cli("dlq", "edit", *other).code == 4
    monkeypatch.setenv("EDITOR", "false")
    assert "ended with 1; nothing was changed" in cli("dlq", "edit", *other).err
    assert cli("dlq", "edit", *other, "--data", "{").code == 1
    editor.write_text("#!/bin/sh\necho '{3,' > $1\n")
    monkeypatch.setenv("EDITOR", str(editor))
    kept = Path(cli("dlq", "edit", *other).err.strip().rpartition(" ")[2])
    assert kept.read_text() == "{3,\n"
    assert cli("dlq", "edit", *other, "--data", "3", "--keep").code == 0
    assert len(cli("dlq", "list", "--queue", name).json) == 1
    assert "no dead letter" in cli("dlq", "edit", *place, "--data", "4").err


def test_dead_letters_are_thrown_away(cli: Cli, name: str) -> None:
    dead(cli, name, "1", "2", "3")
    assert cli("dlq", "purge", name).code == 1
    assert cli("dlq", "purge", name, "--to", "1h ago", "--yes").code == 4
    assert cli("dlq", "purge", name, "--to", "1h ago", "--dry-run").code == 4
    assert cli("dlq", "purge", name, "--dry-run").out == f"would delete 3 dead letters of {name}\n"
    assert cli("dlq", "drain", "--queue", name, "-n", 1, "--dry-run").code == 0
    assert cli("dlq", "drain", "--queue", name, "-n", 1, "--yes").out == "processed=1 errors=0\n"
    assert len(cli("queue", "export", name).lines) == 2
    assert cli("dlq", "purge", name, "--yes").out == "deleted=2\n"
    assert cli("dlq", "drain", "--queue", name, "--yes").code == 4
    assert cli("dlq", "export", name).code == 4


def test_a_message_that_died_in_two_groups_is_drained_once(cli: Cli, name: str) -> None:
    (letter,) = dead(cli, name, "1")
    place = ("--partition-id", letter["partitionId"])
    (popped,) = cli("pop", name, "--cg", "others").lines
    cli("ack", popped["transactionId"], *place, "--cg", "others", "--failed", "--error", "nor here")
    assert len(cli("dlq", "list", "--queue", name).json) == 2
    assert "would delete 1 messages" in cli("dlq", "drain", "--queue", name, "--dry-run").err
    assert cli("dlq", "drain", "--queue", name, "--yes").out == "processed=1 errors=0\n"
    assert cli("dlq", "list", "--queue", name).json == []


def test_traces_are_added_and_found(cli: Cli, name: str) -> None:
    cli("push", name, "--data", "1")
    (message,) = cli("pop", name).lines
    place = (message["partitionId"], message["transactionId"])
    assert cli("trace", "add", *place, "--data", '{"step": 1}', "--name", name, "--event", "step").code == 0
    assert cli("trace", "add", *place, "--data", "{").code == 1
    assert cli("trace", "add", message["partitionId"], "nothing", "--data", "1").code == 2
    assert name in [row["trace_name"] for row in cli("trace", "names", "-n", 500).json]
    (row,) = cli("traces", "by-name", name).json
    assert (row["event_type"], row["data"], row["queue_name"]) == ("step", {"step": 1}, name)
    for listing in (("trace", "by-message", *place), ("messages", "traces", *place)):
        table = cli(*listing, "-o", "table").out.splitlines()
        assert table[0].split() == ["AT", "EVENT", "TRACE", "DATA"]
        assert table[1].split()[1:] == ["step", name, '{"step":1}']
