"""`queen apply` and `queen export`: queues, groups, topics, quotas, write modes and pipelines as a file describes them.

kind: Queue            kind: ConsumerGroup     kind: Topic               kind: Quota
name: orders           name: billing           namespace: payments       namespace: payments
namespace: billing     queue: orders           name: refunds             perMinute: 5000
paused: true           seek-to: beginning      config:
config:                paused: false             max_retries: 5          kind: WriteMode …
  leaseTime: 60

kind: Pipeline         and what its YAML file has besides: sources, steps, sinks, trigger, dead_letters
name: leads
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer

from queen.cli.commands.queue import OPTION_FLAGS as QUEUE_OPTIONS
from queen.cli.commands.queue import queue_settings
from queen.cli.commands.topic import OPTION_FLAGS as TOPIC_OPTIONS
from queen.cli.common.arguments import QUEUE_MODE, DryRun, Yes, opened, source_name, writer
from queen.cli.common.exits import NothingFound, UserError
from queen.cli.common.log import positions
from queen.cli.common.output import Output
from queen.cli.common.printable import printable
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import BEGINNING_WORDS, END_WORDS, iso, parse_time
from queen.cli.common.tree import command, group
from queen.suggestions import did_you_mean
from queen.wire.paths import path_of

apply_app = group("Bring queues, groups, topics, quotas, write modes and pipelines into the state a file describes.")
export_app = group("Write the file that `queen apply` reads.")

_FIELDS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "Queue": (("name",), ("namespace", "task", "config", "paused")),
    "ConsumerGroup": (("name", "queue"), ("seek-to", "paused")),
    "Topic": (("namespace", "name"), ("config", "paused")),
    "Quota": (("namespace", "perMinute"), ()),
    "WriteMode": (("namespace", "mode"), ()),
    "Pipeline": (("name", "sources", "sinks"), ("steps", "trigger", "dead_letters")),
}
"""Kinds of documents: the fields that they must have, and those that they may have."""

_TEXTS: Final = frozenset({"name", "namespace", "task", "queue", "mode"})
"""Fields that are names, in documents of any kind."""

_PAUSES: Final[Mapping[str, tuple[str, str]]] = {
    "Queue": ("pause_queue", "resume_queue"),
    "ConsumerGroup": ("pause_consumer_group", "resume_consumer_group"),
    "Topic": ("pause_topic", "resume_topic"),
}
"""The calls that pause and resume the object of a document; they take the fields that it must have."""

# Groups need their queues, and what is deleted may be needed by nothing that is made.
_ORDER: Final = ("Queue", "ConsumerGroup", "Topic", "Quota", "WriteMode", "Pipeline")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is to be made, changed or deleted, and how."""

    action: str
    """`create`, `change`, `delete` or `keep`."""
    kind: str
    name: str
    act: Callable[[], Any] | None = None
    differences: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    note: str = ""

    @property
    def row(self) -> dict[str, Any]:
        changes = {name: {"from": before, "to": after} for name, (before, after) in self.differences.items()}
        return {"action": self.action, "kind": self.kind, "name": self.name, "changes": changes, "note": self.note}


@command(
    apply_app,
    "apply",
    example="""
queen apply -f queues.yaml
queen apply -f queues.yaml --diff --dry-run
queen export | queen apply -f - --server http://other:6632
""",
)
def apply(
    ctx: typer.Context,
    file: Annotated[Path, typer.Option("-f", "--file", help="YAML of one or several documents; - is stdin.")],
    diff: Annotated[bool, typer.Option("--diff", help="Show every option that changes.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete what the file does not name, of the kinds that it names.")
    ] = False,
    seek: Annotated[bool, typer.Option("--seek", help="Move groups that exist to their seek-to as well.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Bring queues, groups, topics, quotas, write modes and pipelines into the state a file describes.

    What the file does not say about a thing stays. Applied twice, the second time changes nothing.
    Exit code 4 when the file is empty.
    """
    session = Session.of(ctx)
    documents = read_documents(file)
    if not documents:
        raise NothingFound
    changes = []
    with session.out.progress("comparing") as bar:
        for change in plan(session, documents, prune=prune, seek=seek):
            changes.append(change)
            bar.advance()
    doomed = [change for change in changes if change.action == "delete"]
    if doomed and not dry_run:
        session.confirm(yes, f"deleting {', '.join(f'{one.kind} {one.name}' for one in doomed)}")
    as_table = session.out.given in (None, "table", "wide")
    with session.out.progress("applying", len(changes), beside_lines=as_table) as bar:
        for change in changes:
            if change.act is not None and not dry_run:
                change.act()
            if as_table:
                _describe(session.out, change, diff, dry_run)
            bar.advance()
    if not as_table:
        session.out.value([change.row for change in changes])


@command(
    export_app, "export", example="queen export > queen.yaml\nqueen export --kind Queue --kind Topic -f queen.yaml"
)
def export(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Where to; stdout by default.")] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help=f"Only {', '.join(_FIELDS)}; may be repeated.")
    ] = None,
    topic_namespace: Annotated[
        list[str] | None, typer.Option("--topic-namespace", help="A namespace of topics besides those in use.")
    ] = None,
) -> None:
    """Write the file that `queen apply` reads: everything but messages and positions."""
    import yaml

    for one in kind or []:
        if one not in _FIELDS:
            raise UserError(f"there is no kind {one!r}; there is {', '.join(_FIELDS)}")
    session = Session.of(ctx)
    documents = [
        document
        for document in present_documents(session, topic_namespace or [])
        if not kind or document["kind"] in kind
    ]
    with writer(file) as target:
        target.write(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))
    session.out.note(f"exported {len(documents)} documents")


def read_documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a manifest, checked. Raises `UserError` that names the first bad one."""
    import yaml

    from queen.wire.yaml_text import check_aliases

    name = source_name(path)
    with opened(path) as source:
        try:
            text = source.read()
            check_aliases(text)
            found = [document for document in yaml.safe_load_all(text) if document is not None]
        except yaml.YAMLError as error:
            raise UserError(f"{name} is not YAML: {error}") from error
    names: set[tuple[str, str]] = set()
    for number, document in enumerate(found, 1):
        _check(document, f"document {number} of {name}")
        described = (document["kind"], _name(document))
        if described in names:
            raise UserError(f"document {number} of {name} names {described[0]} {described[1]!r} a second time")
        names.add(described)
    return found


def plan(session: Session, documents: Sequence[dict[str, Any]], *, prune: bool, seek: bool) -> Iterator[Change]:
    """What has to be done, in order, so that the server is as the documents say."""
    made = {document["name"] for document in documents if document["kind"] == "Queue"}
    state = _State(session)
    planners: dict[str, Callable[[dict[str, Any]], Change]] = {
        "Queue": lambda document: _plan_queue(session, document),
        "ConsumerGroup": lambda document: _plan_group(session, document, made, seek),
        "Topic": lambda document: _plan_topic(session, state, document),
        "Quota": lambda document: _plan_quota(session, state, document),
        "WriteMode": lambda document: _plan_mode(session, state, document),
        "Pipeline": lambda document: _plan_pipeline(session, state, document),
    }
    for kind in _ORDER:
        for document in documents:
            if document["kind"] == kind:
                change = planners[kind](document)
                if document.get("paused") is not None:
                    change = _with_pause(session, change, document, state.is_paused(document))
                yield change
    if prune:
        yield from _plan_prune(session, state, documents)


class _State:
    """The state of the server, requested when it is first needed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._namespaces: list[dict[str, Any]] | None = None
        self._modes: dict[str, Any] | None = None
        self._pipelines: dict[str, dict[str, Any]] | None = None
        self._topics: dict[str, dict[str, dict[str, Any]]] = {}

    @property
    def quotas(self) -> dict[str, int]:
        """Quotas that were set; those of NAMESPACE_QUOTAS alone are not the server's to forget."""
        found = ((one["namespace"], one["quotaPerMinute"]) for one in self.namespaces)
        return {namespace: quota for namespace, quota in found if quota is not None}

    @property
    def namespaces(self) -> list[dict[str, Any]]:
        """Namespaces that have topics or a quota."""
        if self._namespaces is None:
            self._namespaces = self._session.admin.list_topic_namespaces()["namespaces"]
        return self._namespaces

    @property
    def modes(self) -> dict[str, Any]:
        if self._modes is None:
            self._modes = self._session.admin.get_write_modes() or {}
        return self._modes

    @property
    def pipelines(self) -> dict[str, dict[str, Any]]:
        if self._pipelines is None:
            found = self._session.admin.list_pipeline_declarations()["declarations"]
            self._pipelines = {one["name"]: one["declaration"] for one in found}
        return self._pipelines

    def is_paused(self, document: Mapping[str, Any]) -> bool:
        """Whether the object of a document exists and is paused."""
        if document["kind"] == "Topic":
            return bool(self.topics(document["namespace"]).get(document["name"], {}).get("paused"))
        of_group = document["kind"] == "ConsumerGroup"
        found = queue_settings(self._session, document["queue"] if of_group else document["name"]) or {}
        return document["name"] in found.get("pausedGroups", ()) if of_group else bool(found.get("paused"))

    def topics(self, namespace: str) -> dict[str, dict[str, Any]]:
        if namespace not in self._topics:
            found = self._session.admin.get_topic_counts(namespace) or []
            self._topics[namespace] = {topic["topic"]: topic for topic in found}
        return self._topics[namespace]


def _with_pause(session: Session, change: Change, document: Mapping[str, Any], paused: bool) -> Change:
    """The change, after which the thing is paused or not as the document says."""
    wanted = document["paused"]
    if wanted == paused:
        return change
    call = getattr(session.admin, _PAUSES[change.kind][0 if wanted else 1])
    names = [document[name] for name in _FIELDS[change.kind][0]]

    def act() -> None:
        if change.act is not None:
            change.act()
        check_answer(call(*names))

    action = "change" if change.action == "keep" else change.action
    return replace(change, action=action, act=act, differences={**change.differences, "paused": (paused, wanted)})


def _plan_queue(session: Session, document: Mapping[str, Any]) -> Change:
    name = document["name"]
    wanted = dict(document.get("config") or {})
    present = queue_settings(session, name)
    if present is None:
        labels = {key: document[key] for key in ("namespace", "task") if document.get(key)}
        differences = {key: (None, value) for key, value in {**labels, **wanted}.items()}
        sent = {key: value for key, value in wanted.items() if value is not None}
        return Change(
            "create",
            "Queue",
            name,
            lambda: check_answer(
                session.admin.configure_queue(name, sent, labels.get("namespace", ""), labels.get("task", ""))
            ),
            differences,
        )
    before = {"namespace": present["namespace"], "task": present["task"], **present["options"]}
    after = {**before, **{key: document[key] for key in ("namespace", "task") if key in document}, **wanted}
    after = {key: value or "" if key in ("namespace", "task") else value for key, value in after.items()}
    differences = _differences(before, after)
    if not differences:
        return Change("keep", "Queue", name)
    options = {key: after[key] for key in present["options"] if after[key] is not None}
    return Change(
        "change",
        "Queue",
        name,
        lambda: check_answer(session.admin.configure_queue(name, options, after["namespace"], after["task"])),
        differences,
    )


def _plan_group(session: Session, document: Mapping[str, Any], made: set[str], seek: bool) -> Change:
    name, queue, to = document["name"], document["queue"], str(document.get("seek-to", "beginning"))
    label = f"{name} on {queue}"
    group_positions = (session.admin.get_consumer_group(name) or {}).get(queue)
    if group_positions is None:
        if queue not in made and queue_settings(session, queue) is None:
            raise UserError(f"ConsumerGroup {name!r} reads queue {queue!r}, which neither exists nor is in the file")
        return Change(
            "create", "ConsumerGroup", label, lambda: _subscribe(session, name, queue, to), {"seek-to": (None, to)}
        )
    if "seek-to" not in document or not seek:
        note = "exists; --seek moves it" if "seek-to" in document else ""
        return Change("keep", "ConsumerGroup", label, note=note)
    differences = _moves(session, queue, group_positions["partitions"], to)
    if not differences:
        return Change("keep", "ConsumerGroup", label)
    return Change("change", "ConsumerGroup", label, lambda: _seek(session, name, queue, to), differences)


def _plan_topic(session: Session, state: _State, document: Mapping[str, Any]) -> Change:
    namespace, topic = document["namespace"], document["name"]
    wanted = dict(document.get("config") or {})
    label = f"{namespace}/{topic}"
    present = state.topics(namespace).get(topic)
    configure = lambda: session.admin.configure_topic(namespace, topic, wanted)  # noqa: E731
    if present is None:
        return Change("create", "Topic", label, configure, {key: (None, value) for key, value in wanted.items()})
    differences = _differences(present["options"], {**present["options"], **wanted})
    # Null is the default, which only the server knows: it is set where it would change something.
    differences = {key: pair for key, pair in differences.items() if pair[1] is not None or key == "ttl_seconds"}
    return Change("change" if differences else "keep", "Topic", label, configure if differences else None, differences)


def _plan_quota(session: Session, state: _State, document: Mapping[str, Any]) -> Change:
    namespace, wanted = document["namespace"], document["perMinute"]
    before = state.quotas.get(namespace)
    if before == wanted:
        return Change("keep", "Quota", namespace)
    action = "create" if namespace not in state.quotas else "change"
    return Change(
        action, "Quota", namespace, lambda: session.admin.set_quota(namespace, wanted), {"perMinute": (before, wanted)}
    )


def _plan_mode(session: Session, state: _State, document: Mapping[str, Any]) -> Change:
    namespace, wanted = document["namespace"], document["mode"]
    before = state.modes.get(namespace)
    if before == wanted:
        return Change("keep", "WriteMode", namespace)
    return Change(
        "create" if before is None else "change",
        "WriteMode",
        namespace,
        lambda: session.admin.set_write_mode(namespace, wanted),
        {"mode": (before, wanted)},
    )


def _plan_pipeline(session: Session, state: _State, document: Mapping[str, Any]) -> Change:
    name, wanted = document["name"], _sections(document)
    before = state.pipelines.get(name)
    # As text, because the order of steps matters.
    if before is not None and json.dumps(before) == json.dumps(wanted):
        return Change("keep", "Pipeline", name)
    keys = {**wanted, **(before or {})}
    differences = {key: ((before or {}).get(key), wanted.get(key)) for key in keys}
    differences = {key: pair for key, pair in differences.items() if json.dumps(pair[0]) != json.dumps(pair[1])}
    return Change(
        "create" if before is None else "change",
        "Pipeline",
        name,
        lambda: check_answer(session.admin.declare_pipeline(name, wanted)),
        differences,
    )


def _sections(document: Mapping[str, Any]) -> dict[str, Any]:
    """What of a document makes the pipeline, in the order in which the server has it."""
    given = {key: document.get(key) for key in ("sources", "sinks", "steps", "trigger", "dead_letters")}
    return {key: value for key, value in given.items() if value not in (None, {})}


def _plan_prune(session: Session, state: _State, documents: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Deletions of what the file does not name, of the kinds that it names."""
    named = {(document["kind"], _name(document)) for document in documents}
    kinds = {document["kind"] for document in documents}
    queues = session.admin.list_queues()["queues"] if "Queue" in kinds else []
    doomed = {queue["name"]: queue for queue in queues if ("Queue", queue["name"]) not in named}
    if "ConsumerGroup" in kinds:
        for row in session.admin.list_consumer_groups() or []:
            name, queue = row["name"], row["queueName"]
            # Groups go with their queue.
            if name != QUEUE_MODE and queue not in doomed and ("ConsumerGroup", f"{name} on {queue}") not in named:
                yield Change("delete", "ConsumerGroup", f"{name} on {queue}", _forget(session, name, queue))
    if "Topic" in kinds:
        for namespace in sorted({*state.modes, *(one["namespace"] for one in state.namespaces)}):
            for topic, found in state.topics(namespace).items():
                if ("Topic", f"{namespace}/{topic}") not in named:
                    note = f"with {found['ready'] + found['delayed'] + found['leased']} items"
                    act = _delete_topic(session, namespace, topic)
                    yield Change("delete", "Topic", f"{namespace}/{topic}", act, note=note)
    if "Quota" in kinds:
        for namespace, quota in state.quotas.items():
            if ("Quota", namespace) not in named:
                act = _unset_quota(session, namespace)
                yield Change("delete", "Quota", namespace, act, {"perMinute": (quota, None)})
    if "WriteMode" in kinds:
        for namespace, mode in state.modes.items():
            if ("WriteMode", namespace) not in named:
                act = _unset_mode(session, namespace)
                yield Change("delete", "WriteMode", namespace, act, {"mode": (mode, None)})
    if "Pipeline" in kinds:
        for name in state.pipelines:
            if ("Pipeline", name) not in named:
                yield Change("delete", "Pipeline", name, _forget_pipeline(session, name))
    for name, queue in doomed.items():
        note = f"with {queue['messages']['total']} messages"
        yield Change("delete", "Queue", name, _delete_queue(session, name), note=note)


def present_documents(session: Session, topic_namespaces: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Everything that the server has, as documents."""
    state = _State(session)
    for queue in sorted(session.admin.list_queues()["queues"], key=lambda queue: str(queue["name"])):
        found = queue_settings(session, queue["name"])
        if found is not None:
            labels = {"namespace": found["namespace"], "task": found["task"]}
            yield {"kind": "Queue", "name": found["name"], **labels, "config": found["options"], **_paused(found)}
    for row in session.admin.list_consumer_groups() or []:
        if row["name"] != QUEUE_MODE:
            start = row["subscriptionTimestamp"] or "beginning"
            names = {"name": row["name"], "queue": row["queueName"]}
            yield {"kind": "ConsumerGroup", **names, "seek-to": start, **_paused(row)}
    in_use = {one["namespace"] for one in state.namespaces}
    for namespace in sorted({*in_use, *state.modes, *topic_namespaces}):
        for topic in state.topics(namespace).values():
            names = {"namespace": namespace, "name": topic["topic"]}
            yield {"kind": "Topic", **names, "config": topic["options"], **_paused(topic)}
    for namespace, per_minute in sorted(state.quotas.items()):
        yield {"kind": "Quota", "namespace": namespace, "perMinute": per_minute}
    for namespace, mode in sorted(state.modes.items()):
        yield {"kind": "WriteMode", "namespace": namespace, "mode": mode}
    for name, declaration in state.pipelines.items():
        yield {"kind": "Pipeline", "name": name, **declaration}


def _paused(found: Mapping[str, Any]) -> dict[str, bool]:
    # Also when it is not paused: fields that a file lacks stay as they are where it is applied.
    return {"paused": bool(found.get("paused"))}


def _check(document: Any, where: str) -> None:
    if not isinstance(document, dict) or "kind" not in document:
        raise UserError(f"{where} has no kind; it is one of {', '.join(_FIELDS)}")
    kind = document["kind"]
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise UserError(f"{where} is of unknown kind {kind!r}{_nearest(str(kind), list(_FIELDS))}")
    needed, allowed = _FIELDS[kind]
    for name in needed:
        if document.get(name) in (None, ""):
            raise UserError(f"{where}: a {kind} needs {name}")
    for name in document:
        if name not in ("kind", *needed, *allowed):
            raise UserError(f"{where}: a {kind} has no {name!r}{_nearest(str(name), [*needed, *allowed])}")
    for name in _TEXTS.intersection(document):
        # YAML takes 7, on and 2026-01-01 for a number, true and a date.
        if not isinstance(document[name], str | None):
            raise UserError(f"{where}: {name} must be text, not {document[name]}; put it in quotes")
    if kind == "WriteMode" and document["mode"] not in ("sync", "buffered"):
        raise UserError(f"{where}: mode must be sync or buffered, not {document['mode']!r}")
    if kind == "Quota" and (type(document["perMinute"]) is not int or document["perMinute"] < 0):
        raise UserError(f"{where}: perMinute must be a whole number, not {document['perMinute']!r}")
    if not isinstance(document.get("paused", False), bool):
        raise UserError(f"{where}: paused must be true or false, not {document['paused']!r}")
    if kind in ("Queue", "Topic"):
        _check_config(document, where, QUEUE_OPTIONS if kind == "Queue" else TOPIC_OPTIONS)
    if kind == "Pipeline":
        _check_pipeline(document, where)
    if "seek-to" in document and str(document["seek-to"]).lower() not in END_WORDS:
        try:
            parse_time(str(document["seek-to"]))
        except typer.BadParameter as error:
            raise UserError(f"{where}: seek-to: {error.message}") from error


def _check_pipeline(document: Mapping[str, Any], where: str) -> None:
    """As `queen pipeline validate --no-spark` does."""
    import tempfile

    import yaml

    from queen.pipelines.errors import DeclarationError
    from queen.pipelines.loading import load_yaml

    for name, step in (document.get("steps") or {}).items():
        for key in ("frame", "each"):
            if isinstance(step, dict) and key in step:
                raise UserError(f"{where}: step {name!r} calls a function of a file: queen pipeline run that file")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pipeline.yaml"
        sections = {"pipeline": document["name"], **_sections(document)}
        path.write_text(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True), "utf-8")
        try:
            load_yaml(path)
        except DeclarationError as error:
            raise UserError(f"{where}: {'; '.join(problem.text for problem in error.problems)}") from error


def _check_config(document: Mapping[str, Any], where: str, known: Mapping[str, str]) -> None:
    from queen.errors import BadRequest
    from queen.wire.api.resources.queues import QueueOptions
    from queen.wire.api.resources.topics import TopicOptions
    from queen.wire.options import read_options

    config = document.get("config") or {}
    if not isinstance(config, dict):
        raise UserError(f"{where}: config must be options with their values")
    for name, value in config.items():
        if name not in known:
            raise UserError(f"{where}: there is no option {name!r}{_nearest(str(name), list(known))}")
        if value is not None and not isinstance(value, int):
            raise UserError(f"{where}: option {name} must be a whole number, true or false, not {value!r}")
    try:
        # As the server would, but before anything is changed.
        read_options(QueueOptions if document["kind"] == "Queue" else TopicOptions, config)
    except BadRequest as error:
        raise UserError(f"{where}: {str(error).partition(' (at ')[0]}") from error


def _nearest(name: str, known: Sequence[str]) -> str:
    return "; " + did_you_mean(name, known, f"there is {', '.join(known)}", cutoff=0.5)


def _name(document: Mapping[str, Any]) -> str:
    if document["kind"] == "ConsumerGroup":
        return f"{document['name']} on {document['queue']}"
    if document["kind"] == "Topic":
        return f"{document['namespace']}/{document['name']}"
    return str(document.get("name") or document.get("namespace"))


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def _moves(session: Session, queue: str, present: Sequence[Mapping[str, Any]], to: str) -> dict[str, tuple[Any, Any]]:
    """Partitions on which a group is elsewhere than at a place: the offset it is at, and that of the place."""
    word = to.lower()
    # The server moves behind the last message that was stored at the time or before.
    after = None if word in (*END_WORDS, *BEGINNING_WORDS) else iso(parse_time(to) + timedelta(microseconds=1))
    moves: dict[str, tuple[Any, Any]] = {}
    lags = {row["partition"]: row["offsetLag"] for row in present}
    for place in positions(session, queue, None, after):
        if place["partition"] not in lags:
            continue
        at = place["nextOffset"] - lags[place["partition"]]
        if word in END_WORDS:
            target = place["nextOffset"]
        elif after is None:
            target = place["firstOffset"]
        else:
            target = place["nextOffset"] if place["offsetAt"] is None else place["offsetAt"]
        if at != target:
            moves[place["partition"]] = (at, target)
    return moves


def _seek(session: Session, name: str, queue: str, to: str) -> None:
    body = {"toEnd": True} if to.lower() in END_WORDS else {"timestamp": iso(parse_time(to))}
    check_answer(session.admin.seek_consumer_group(name, queue, body))


def _subscribe(session: Session, name: str, queue: str, to: str) -> None:
    """Have a new group begin at a place: its first pop makes it, and the seek takes back what that pop leased."""
    start = "now" if to.lower() in END_WORDS else iso(parse_time(to))
    asked = urlencode({"consumerGroup": name, "subscriptionFrom": start, "batch": 1, "wait": "false"})
    session.queen.request("GET", f"{path_of('/api/v1/pop/queue', queue)}?{asked}")
    _seek(session, name, queue, to)


def _forget(session: Session, name: str, queue: str) -> Callable[[], Any]:
    return lambda: check_answer(session.admin.delete_consumer_group_for_queue(name, queue))


def _delete_queue(session: Session, name: str) -> Callable[[], Any]:
    return lambda: check_answer(session.admin.delete_queue(name))


def _delete_topic(session: Session, namespace: str, topic: str) -> Callable[[], Any]:
    asked = urlencode({"namespace": namespace, "topic": topic})
    return lambda: session.queen.request("DELETE", f"/api/v1/topics?{asked}")


def _forget_pipeline(session: Session, name: str) -> Callable[[], Any]:
    return lambda: session.admin.forget_pipeline(name)


def _unset_quota(session: Session, namespace: str) -> Callable[[], Any]:
    return lambda: session.admin.set_quota(namespace, None)


def _unset_mode(session: Session, namespace: str) -> Callable[[], Any]:
    return lambda: session.admin.set_write_mode(namespace, None)


_VERBS: Final = {"create": "applied", "change": "applied", "delete": "deleted", "keep": "unchanged"}
_SIGNS: Final = {"create": ("+", "green"), "change": ("~", "yellow"), "delete": ("-", "red"), "keep": ("=", "dim")}


def _describe(out: Output, change: Change, diff: bool, dry_run: bool) -> None:
    note = f" ({change.note})" if change.note else ""
    if not diff:
        verb = f"would have {_VERBS[change.action]}" if dry_run and change.action != "keep" else _VERBS[change.action]
        out.done(f'{verb} {change.kind} "{change.name}"{note}')
        return
    sign, style = _SIGNS[change.action]
    out.text(out.styled(f"{sign} {change.kind} {change.name}{note}", style))
    for name, (before, after) in change.differences.items():
        if change.action == "create":
            out.text(f"    {name}: {_shown(after)}")
        else:
            out.text(f"    {name}: {_shown(before)} -> {_shown(after)}")


def _shown(value: Any) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else printable(str(value))
