"""`queen apply` and `queen export`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from queen.embedded import EmbeddedPostgres
from tests.cli.conftest import Cli, Served, new_database, serving

MANIFEST = """
kind: ConsumerGroup
name: {name}
queue: {name}
seek-to: beginning
---
kind: Queue
name: {name}
namespace: billing
config: {{leaseTime: 60, retryLimit: 0, retentionEnabled: true}}
---
kind: Topic
namespace: {name}
name: refunds
config: {{max_retries: 0}}
---
kind: Quota
namespace: {name}
perMinute: 500
---
kind: WriteMode
namespace: {name}
mode: buffered
---
kind: Pipeline
name: {name}
sources: {{events: {{queue: "{name}"}}}}
steps:
  large: {{sql: SELECT * FROM events WHERE offset > 10}}
  few: {{sql: SELECT * FROM large LIMIT 3}}
sinks: {{copy: {{from: few, parquet: /tmp/{name}}}}}
"""


@pytest.fixture
def manifest(name: str, tmp_path: Path) -> Path:
    path = tmp_path / "queen.yaml"
    path.write_text(MANIFEST.format(name=name))
    return path


def test_applied_twice_the_second_time_changes_nothing(cli: Cli, name: str, manifest: Path) -> None:
    dry = cli("apply", "-f", manifest, "--dry-run", "--diff")
    assert dry.out.splitlines()[:5] == [
        f"+ Queue {name}",
        "    namespace: billing",
        "    leaseTime: 60",
        "    retryLimit: 0",
        "    retentionEnabled: true",
    ]
    assert cli("queue", "describe", name).code == 2
    first = cli("apply", "-f", manifest)
    assert first.out.splitlines() == [
        f'applied Queue "{name}"',
        f'applied ConsumerGroup "{name} on {name}"',
        f'applied Topic "{name}/refunds"',
        f'applied Quota "{name}"',
        f'applied WriteMode "{name}"',
        f'applied Pipeline "{name}"',
    ]
    second = cli("apply", "-f", manifest, "-o", "json").json
    assert {change["action"] for change in second} == {"keep"}
    assert cli("queue", "describe", name).json["options"]["retryLimit"] == 0
    assert cli("topic", "describe", name, "refunds").json["options"]["max_retries"] == 0


def test_the_diff_is_what_happens_and_what_is_not_named_stays(cli: Cli, name: str) -> None:
    cli("queue", "configure", name, "--priority", 3, "--lease-time", 60, "--task", "kept")
    file = f"kind: Queue\nname: {name}\nconfig: {{leaseTime: 90, ttl: 10}}"
    ran = cli("apply", "-f", "-", "--diff", stdin=file)
    assert ran.out == f"~ Queue {name}\n    leaseTime: 60 -> 90\n    ttl: default -> 10\n"
    found = cli("queue", "describe", name).json
    assert (found["options"]["priority"], found["options"]["leaseTime"], found["task"]) == (3, 90, "kept")
    assert (
        cli("apply", "-f", "-", "--diff", stdin=file.replace("ttl: 10", "ttl: null")).out.splitlines()[1]
        == "    ttl: 10 -> default"
    )
    assert cli("queue", "describe", name).json["options"]["ttl"] is None


def test_groups_that_exist_are_moved_only_when_asked(cli: Cli, name: str, manifest: Path) -> None:
    cli("push", name, stdin="1\n2\n3")
    cli("apply", "-f", manifest)
    assert len(cli("pop", name, "--cg", name, "-n", 9, "--auto-ack").lines) == 3
    assert "unchanged ConsumerGroup" in cli("apply", "-f", manifest).out
    assert cli("pop", name, "--cg", name, "--no-wait").code == 4
    moved = cli("apply", "-f", manifest, "--seek", "--diff").out
    assert f"~ ConsumerGroup {name} on {name}\n    Default: 3 -> 0\n" in moved
    assert f"= ConsumerGroup {name} on {name}\n" in cli("apply", "-f", manifest, "--seek", "--diff").out
    assert len(cli("pop", name, "--cg", name, "-n", 9, "--auto-ack").lines) == 3
    end = f"kind: ConsumerGroup\nname: late\nqueue: {name}\nseek-to: end"
    assert cli("apply", "-f", "-", stdin=end).code == 0
    assert cli("pop", name, "--cg", "late", "--no-wait").code == 4


def test_prune_deletes_what_the_file_does_not_name(cli: Cli, name: str, manifest: Path) -> None:
    text = manifest.read_text()
    cli("apply", "-f", manifest)
    cli("apply", "-f", "-", stdin=text.replace(name, f"{name}-2"))
    cli("apply", "-f", "-", stdin=f"kind: ConsumerGroup\nname: other\nqueue: {name}")
    cli("topic", "configure", name, "other")
    cli("push", f"{name}-2", stdin="1\n2")
    prune = ("apply", "-f", manifest, "--prune")
    dry = cli(*prune, "--dry-run", "--diff").out
    mine = [line for line in dry.splitlines() if line.startswith("- ") and name in line]
    assert mine == [
        f"- ConsumerGroup other on {name}",
        f"- Topic {name}/other (with 0 items)",
        f"- Topic {name}-2/refunds (with 0 items)",
        f"- Quota {name}-2",
        f"- WriteMode {name}-2",
        f"- Pipeline {name}-2",
        f"- Queue {name}-2 (with 2 messages)",
    ]
    refused = cli(*prune)
    assert refused.code == 1
    assert "pass --yes" in refused.err
    assert cli("queue", "describe", f"{name}-2").code == 0
    assert cli(*prune, "--yes", "--diff").out == dry
    assert {change["action"] for change in cli(*prune, "-o", "json").json} == {"keep"}
    exported = yaml.safe_load_all(cli("export").out)
    assert {(one["kind"], one.get("name")) for one in exported} == {
        (one["kind"], one.get("name")) for one in yaml.safe_load_all(text)
    }


def test_only_kinds_that_the_file_names_are_pruned(cli: Cli, name: str, manifest: Path) -> None:
    cli("apply", "-f", manifest)
    assert cli("apply", "-f", "-", "--prune", "--yes", stdin=f"kind: Quota\nnamespace: {name}\nperMinute: 1").code == 0
    assert cli("queue", "describe", name).code == 0
    assert cli("topic", "describe", name, "refunds").code == 0


def test_quotas_of_the_settings_are_neither_exported_nor_pruned(
    cli: Cli, postgres: EmbeddedPostgres, tmp_path: Path, name: str
) -> None:
    dsn = asyncio.run(new_database(postgres))
    with serving(dsn, tmp_path, namespace_quotas=(("default", 10), (name, 5))) as configured:
        server = ("--server", configured.url)
        assert cli("export", *server).out == ""
        file = f"kind: Quota\nnamespace: {name}\nperMinute: 7"
        assert cli("apply", "-f", "-", "--prune", *server, stdin=file).out == f'applied Quota "{name}"\n'
        assert cli("apply", "-f", "-", "--prune", *server, stdin=file).out == f'unchanged Quota "{name}"\n'


def test_what_is_exported_changes_nothing_when_it_is_applied(
    cli: Cli, name: str, manifest: Path, tmp_path: Path
) -> None:
    cli("apply", "-f", manifest)
    file = tmp_path / "all.yaml"
    assert cli("export", "-f", file, "--topic-namespace", name).code == 0
    documents = list(yaml.safe_load_all(file.read_text()))
    assert {document["kind"] for document in documents} == {
        "Queue",
        "ConsumerGroup",
        "Topic",
        "Quota",
        "WriteMode",
        "Pipeline",
    }
    changes = cli("apply", "-f", file, "-o", "json").json
    assert {change["action"] for change in changes} == {"keep"}
    only = list(yaml.safe_load_all(cli("export", "--kind", "Quota").out))
    assert {document["kind"] for document in only} == {"Quota"}
    assert cli("export", "--kind", "Quote").code == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kind: Queu", "unknown kind 'Queu'; did you mean 'Queue'?"),
        ("name: x", "has no kind"),
        ("kind: Queue", "a Queue needs name"),
        ("kind: Queue\nname: x\nconfg: {}", "a Queue has no 'confg'; did you mean 'config'?"),
        ("kind: Queue\nname: x\nconfig: {leasTime: 1}", "no option 'leasTime'; did you mean 'leaseTime'?"),
        ("kind: Queue\nname: x\nconfig: {leaseTime: soon}", "option leaseTime must be a whole number"),
        ("kind: Queue\nname: x\nconfig: {retryLimit: -4}", "option retryLimit must be a whole number from 0 to"),
        ("kind: Queue\nname: x\nconfig: {retentionEnabled: 3}", "option retentionEnabled must be true or false"),
        ("kind: Topic\nnamespace: x\nname: y\nconfig: {lease_seconds: 0}", "option lease_seconds must be a whole"),
        ("kind: Quota\nnamespace: x\nperMinute: true", "perMinute must be a whole number"),
        ("kind: Queue\nname: x\n---\nkind: Queue\nname: x", "names Queue 'x' a second time"),
        ("kind: WriteMode\nnamespace: x\nmode: fast", "mode must be sync or buffered"),
        ("kind: Queue\nname: x\npaused: maybe", "paused must be true or false"),
        ("kind: Quota\nnamespace: x\nperMinute: many", "perMinute must be a whole number"),
        ("kind: ConsumerGroup\nname: g\nqueue: q\nseek-to: soon", "is not a time"),
        ("kind: ConsumerGroup\nname: g\nqueue: no-such-queue", "neither exists nor is in the file"),
        ("kind: Pipeline\nname: x\nsinks: {a: {console: true}}", "a Pipeline needs sources"),
        ("kind: Pipeline\nname: x\nsources: {a: {queue: q}}\nsinks: {b: {from: c, console: true}}", "c"),
        (
            "kind: Pipeline\nname: x\nsources: {a: {queue: q}}\nsteps: {f: {from: a, frame: my.py:f}}\n"
            "sinks: {b: {from: f, console: true}}",
            "step 'f' calls a function of a file",
        ),
        ("{", "is not YAML"),
        ("kind: [Queue]", "unknown kind ['Queue']"),
        ("kind: Queue\nname: 7", "name must be text, not 7; put it in quotes"),
        ("kind: Queue\nname: [a, b]", "name must be text, not ['a', 'b']"),
        ("kind: Queue\nname: x\nnamespace: on", "namespace must be text, not True"),
        ("kind: Topic\nnamespace: x\nname: 2026-01-01", "name must be text, not 2026-01-01; put"),
        ("kind: Queue\nname: x\n1: 2", "a Queue has no 1"),
        ("kind: Queue\nname: x\nconfig: {1: 2}", "there is no option 1"),
        ("kind: ConsumerGroup\nname: g\nqueue: q\nseek-to: soon", "document 1 of stdin: seek-to: 'soon' is not a time"),
    ],
)
def test_bad_documents_are_refused_before_anything_is_done(cli: Cli, text: str, problem: str) -> None:
    ran = cli("apply", "-f", "-", stdin=text)
    assert ran.code == 1
    assert problem in ran.err
    assert ran.err.count("\n") == 1


def test_an_empty_file_ends_with_4(cli: Cli) -> None:
    assert cli("apply", "-f", "-", stdin="---\n").code == 4


def test_what_the_file_says_is_paused_is_paused(cli: Cli, name: str, manifest: Path, tmp_path: Path) -> None:
    text = manifest.read_text()
    for line in (f"queue: {name}", "namespace: billing", "name: refunds"):
        text = text.replace(line, f"{line}\npaused: true")
    manifest.write_text(text)
    assert "    paused: true" in cli("apply", "-f", manifest, "--dry-run", "--diff").out
    assert cli("apply", "-f", manifest).code == 0
    assert {row["paused"] for row in cli("group", "list", "--queue", name, "-o", "json").json} == {True}
    again = cli("apply", "-f", manifest, "-o", "json").json
    assert {row["action"] for row in again} == {"keep"}
    exported = yaml.safe_load_all(cli("export", "--topic-namespace", name).out)
    mine = [one for one in exported if name in (one.get("name"), one.get("queue"), one.get("namespace"))]
    assert {one["kind"] for one in mine if one.get("paused")} == {"Queue", "ConsumerGroup", "Topic"}
    manifest.write_text(text.replace("paused: true", "paused: false"))
    changes = {row["kind"]: row["changes"] for row in cli("apply", "-f", manifest, "-o", "json").json}
    for kind in ("Queue", "ConsumerGroup", "Topic"):
        assert changes[kind]["paused"] == {"from": True, "to": False}
    assert not cli("queue", "describe", name, "-o", "json").json["paused"]


def test_a_change_of_the_order_of_steps_changes_a_pipeline(cli: Cli, name: str, manifest: Path) -> None:
    cli("apply", "-f", manifest)
    *_, document = yaml.safe_load_all(manifest.read_text())
    document["steps"] = dict(reversed(document["steps"].items()))
    document["steps"]["few"]["sql"] = "SELECT * FROM events LIMIT 3"
    document["trigger"] = "1 minute"
    text = yaml.safe_dump(document, sort_keys=False)
    dry = cli("apply", "-f", "-", "--dry-run", "-o", "json", stdin=text).json
    assert [(change["action"], list(change["changes"])) for change in dry] == [("change", ["steps", "trigger"])]
    assert cli("apply", "-f", "-", stdin=text).code == 0
    assert cli("apply", "-f", "-", "--diff", stdin=text).out == f"= Pipeline {name}\n"
    other = text.replace(f"name: {name}", f"name: {name}-2", 1)
    cli("apply", "-f", "-", stdin=other)
    assert f'deleted Pipeline "{name}-2"' in cli("apply", "-f", "-", "--prune", "--yes", stdin=text).out


@pytest.fixture(scope="module")
def copy(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A second server."""
    with serving(asyncio.run(new_database(postgres)), tmp_path_factory.mktemp("copy")) as served:
        yield served


_NAMES = st.sampled_from(("a", "b.c", "ü x", "d/e"))
_SECONDS = st.sampled_from((0, 1, 60))
_PLACES = st.sampled_from(("beginning", "end", "1h ago", "2026-04-26T10:59:28Z"))


def _optional(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


@st.composite
def manifests(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Some of everything, so that pruning reaches every kind."""
    documents: list[dict[str, Any]] = []
    queue_options = _optional(
        leaseTime=st.sampled_from((1, 300)),
        retryLimit=_SECONDS,
        ttl=st.sampled_from((None, 10)),
        retentionSeconds=_SECONDS,
        retentionEnabled=st.booleans(),
        encryptionEnabled=st.booleans(),
        dedupWindowSeconds=st.sampled_from((None, 0, 60)),
    )
    labels = _optional(namespace=st.sampled_from(("", "n")), task=st.sampled_from(("", "t")), paused=st.booleans())
    for queue in draw(st.sets(_NAMES, min_size=1, max_size=2)):
        documents.append({"kind": "Queue", "name": queue, **draw(labels), "config": draw(queue_options)})
        for group in draw(st.sets(_NAMES, min_size=1, max_size=2)):
            options = draw(_optional(**{"seek-to": _PLACES, "paused": st.booleans()}))
            documents.append({"kind": "ConsumerGroup", "name": group, "queue": queue, **options})
    topic_options = _optional(max_retries=_SECONDS, ttl_seconds=st.sampled_from((None, 9)), at_most_once=st.booleans())
    for namespace in draw(st.sets(_NAMES, min_size=1, max_size=2)):
        options = draw(_optional(config=topic_options, paused=st.booleans()))
        documents.append({"kind": "Topic", "namespace": namespace, "name": draw(_NAMES), **options})
    for namespace in draw(st.sets(st.one_of(_NAMES, st.just("default")), min_size=1, max_size=2)):
        documents.append({"kind": "Quota", "namespace": namespace, "perMinute": draw(_SECONDS)})
    for namespace in draw(st.sets(_NAMES, min_size=1, max_size=2)):
        documents.append(
            {"kind": "WriteMode", "namespace": namespace, "mode": draw(st.sampled_from(("sync", "buffered")))}
        )
    pipeline = {"sources": {"s": {"queue": "a"}}, "sinks": {"k": {"from": "s", "console": True}}}
    for name in draw(st.sets(st.sampled_from(("a", "b")), min_size=1)):
        documents.append({"kind": "Pipeline", "name": name, **pipeline, **draw(_optional(trigger=st.just("1 minute")))})
    return draw(st.permutations(documents))


@given(manifests())
@settings(
    max_examples=8,
    deadline=None,
    # Servers make shrinking slow, and manifests are short as they are.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_server_and_one_that_its_export_was_applied_to_are_alike(
    cli: Cli, copy: Served, documents: list[dict[str, Any]]
) -> None:
    def apply(text: str, *options: str) -> list[tuple[str, str, str]]:
        """What was done, which was what a dry run had said; nothing is left to do."""
        command = ("apply", "-f", "-", "--prune", "--yes", *options, "-o", "json")
        planned = cli(*command, "--dry-run", stdin=text)
        done = cli(*command, stdin=text)
        assert (done.code, done.err) == (0, "")
        assert done.json == planned.json
        assert {change["action"] for change in cli(*command, stdin=text).json} == {"keep"}
        return [(change["action"], change["kind"], change["name"]) for change in done.json]

    apply(yaml.safe_dump_all(documents))
    exported = cli("export").out
    assert {change[0] for change in apply(exported)} == {"keep"}
    apply(exported, "--server", copy.url)
    assert cli("export", "--server", copy.url).out == exported
