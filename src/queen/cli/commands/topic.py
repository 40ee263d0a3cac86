"""`queen topic`: topics of namespaces, their items, quotas and dead letters."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from queen.cli.common.arguments import Offset, Yes, json_lines, opened, parse_json, source_name
from queen.cli.common.exits import NothingFound, ServerFailed, UserError, telling_progress
from queen.cli.common.output import Column
from queen.cli.common.session import Session
from queen.cli.common.times import iso, parse_duration, parse_time
from queen.cli.common.tree import command, group

app = group("Topics: priority queues of items.")
dlq_app = group("Dead letters of topics.")
quota_app = group("Quotas of namespaces.")
mode_app = group("Write modes of namespaces.")
app.add_typer(dlq_app, name="dlq")
app.add_typer(quota_app, name="quota")
app.add_typer(mode_app, name="mode")

NamespaceName = Annotated[str, typer.Argument(help="The namespace.", metavar="NAMESPACE")]
TopicName = Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")]
Ids = Annotated[list[int], typer.Argument(help="Ids of items.", metavar="ID…")]
Limit = Annotated[int, typer.Option("-n", "--limit", min=1, max=10_000, help="Maximum number.")]

_PATH: Final = "/api/v1/topics"
_LIST = (
    Column("TOPIC", "topic"),
    Column("READY", "ready", right=True),
    Column("DELAYED", "delayed", right=True),
    Column("LEASED", "leased", right=True),
    Column("DEAD", "dead", right=True),
    Column("PAUSED", "paused", wide=True),
    Column("RETRIES", "options.max_retries", wide=True, right=True),
    Column("LEASE", lambda row: f"{row['options']['lease_seconds']}s", wide=True, right=True),
    Column("TTL", "options.ttl_seconds", wide=True, right=True),
)
_ITEMS = (
    Column("ID", "id"),
    Column("PRIORITY", "priority", right=True),
    Column("STATUS", "status"),
    Column("RETRIES", "retries", right=True),
    Column("DELIVER-AFTER", "deliver_after"),
    Column("DATA", lambda row: row.get("data", row.get("payload"))),
    Column("KEY", "idempotency_key", wide=True),
    Column("CREATED", "created_at", wide=True),
)
_DEAD = (
    Column("ID", "id"),
    Column("PRIORITY", "priority", right=True),
    Column("RETRIES", "retries", right=True),
    Column("ERROR", "last_error"),
    Column("MOVED-AT", "moved_at"),
    Column("DATA", lambda row: row.get("data", row.get("payload")), wide=True),
)
OPTION_FLAGS: Final = {
    "max_retries": "max_retries",
    "backoff_base_ms": "backoff_base",
    "backoff_cap_ms": "backoff_cap",
    "lease_seconds": "lease",
    "at_most_once": "at_most_once",
    "ttl_seconds": "ttl",
}
"""Options of a topic, and the flags of `queen topic configure` for them."""


@command(app, "list", aliases=("ls",), example="queen topic list payments\nqueen topic list payments -o wide")
def list_topics(ctx: typer.Context, namespace: NamespaceName) -> None:
    """List the topics of a namespace, with their items by state."""
    session = Session.of(ctx)
    answer = session.admin.get_topic_counts(namespace)
    session.out.rows(answer, _LIST, answer)


@command(app, "describe", aliases=("get", "show"), example="queen topic describe payments refunds")
def describe(ctx: typer.Context, namespace: NamespaceName, topic: TopicName) -> None:
    """Show a topic: its items by state, and its options."""
    session = Session.of(ctx)
    answer = session.admin.get_topic_counts(namespace, topic)
    found = answer[0] if isinstance(answer, list) and answer else answer
    if not found:
        listing = f"queen topic list {shlex.quote(namespace)}"
        raise ServerFailed(f"no topic {topic!r} in namespace {namespace!r}; {listing} shows what there is")
    session.out.value(found)


@command(
    app,
    "configure",
    aliases=("create", "set"),
    example="""
queen topic configure payments refunds --max-retries 0 --lease 60
queen topic configure payments refunds --ttl 1d
""",
)
def configure(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    max_retries: Annotated[
        int | None, typer.Option("--max-retries", min=0, help="Maximum number of retries. [3]")
    ] = None,
    backoff_base: Annotated[
        int | None, typer.Option("--backoff-base", min=0, help="Milliseconds before the first retry. [1000]")
    ] = None,
    backoff_cap: Annotated[
        int | None, typer.Option("--backoff-cap", min=0, help="Maximum backoff in milliseconds. [300000]")
    ] = None,
    lease: Annotated[int | None, typer.Option("--lease", min=1, help="Seconds of a lease. [30]")] = None,
    at_most_once: Annotated[
        bool | None, typer.Option("--at-most-once/--at-least-once", help="Acknowledge on delivery.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option("--ttl", help="How long items may wait once they are due; `none` for forever.")
    ] = None,
) -> None:
    """Set options of a topic; those that are not named stay."""
    given = dict(locals())
    session = Session.of(ctx)
    options = {name: given[flag] for name, flag in OPTION_FLAGS.items() if given[flag] is not None}
    if ttl is not None:
        options["ttl_seconds"] = None if ttl == "none" else int(parse_duration(ttl))
    answer = session.admin.configure_topic(namespace, topic, options)
    session.out.done(f'configured "{namespace}/{topic}"', answer)


@command(app, "pause", example="queen topic pause payments refunds")
def pause(ctx: typer.Context, namespace: NamespaceName, topic: TopicName) -> None:
    """Stop delivering items of a topic; items are enqueued as before."""
    session = Session.of(ctx)
    answer = session.admin.pause_topic(namespace, topic)
    session.out.done(f"paused {namespace}/{topic}" + ("" if answer["changed"] else ", as it was"), answer)


@command(app, "resume", example="queen topic resume payments refunds")
def resume(ctx: typer.Context, namespace: NamespaceName, topic: TopicName) -> None:
    """Deliver items of a topic again; waiting dequeues are served at once."""
    session = Session.of(ctx)
    answer = session.admin.resume_topic(namespace, topic)
    note = "" if answer["changed"] else ", which was not paused"
    session.out.done(f"resumed {namespace}/{topic}{note}", answer)


@command(
    app,
    "enqueue",
    aliases=("push",),
    example="""
queen topic enqueue payments refunds --data '{"order": 7}' --priority 1
queen topic enqueue payments refunds -f items.ndjson --delay 10m
queen topic enqueue payments refunds --data '{"order": 7}' --key refund-7
""",
)
def enqueue(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    data: Annotated[str | None, typer.Option("--data", help="One item, as JSON.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="NDJSON: an item on each line; - is stdin.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", help="Lower is served first. [0]")] = None,
    delay: Annotated[str | None, typer.Option("--delay", help="Delay before delivery.")] = None,
    deliver_after: Annotated[
        str | None, typer.Option("--deliver-after", help="Deliver no earlier than this time.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option("--ttl", help="Time to live: deleted when it has waited this long.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Idempotency key of a single item.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Items of one request.")] = 1000,
) -> None:
    """Enqueue items; prints their ids. Exit code 4 when there was no input."""
    session = Session.of(ctx)
    if delay is not None and deliver_after is not None:
        raise UserError("--delay and --deliver-after exclude each other")
    if key is not None and data is None:
        raise UserError("--key is for a single item, given with --data")
    fields: dict[str, Any] = {"priority": priority, "idempotency_key": key}
    fields["delay"] = None if delay is None else parse_duration(delay)
    fields["deliver_after"] = None if deliver_after is None else iso(parse_time(deliver_after))
    fields["ttl"] = None if ttl is None else parse_duration(ttl)
    common = {"namespace": namespace, "topic": topic, **{name: one for name, one in fields.items() if one is not None}}
    ids: list[int] = []
    waiting: list[dict[str, Any]] = []

    def send() -> None:
        if waiting:
            ids.extend(session.queen.request("POST", f"{_PATH}/enqueue", waiting))
            waiting.clear()

    if data is not None:
        waiting.append({**common, "data": parse_json(data, "--data")})
    else:
        telling = telling_progress(lambda: len(ids), "items were enqueued")
        with telling, opened(file) as source, session.out.progress(f"enqueueing to {namespace}/{topic}") as bar:
            for _, value in json_lines(source, source_name(file)):
                waiting.append({**common, "data": value})
                if len(waiting) == batch:
                    send()
                    bar.advance(batch)
            send()
    send()
    if not ids:
        raise NothingFound
    if session.out.given is None:
        for one in ids:
            session.out.text(str(one))
    else:
        session.out.value(ids)


@command(
    app,
    "dequeue",
    aliases=("pop",),
    example="queen topic dequeue payments refunds -n 5 --lease 60\nqueen topic dequeue payments refunds --ack",
)
def dequeue(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    limit: Limit = 1,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the first item.")] = True,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "10s",
    lease: Annotated[float | None, typer.Option("--lease", help="Seconds of the lease.")] = None,
    ack: Annotated[bool, typer.Option("--ack", help="Acknowledge the items once they are printed.")] = False,
) -> None:
    """Lease the next items; prints a line of JSON for each, which is what ack and nack read.

    Exit code 4 when there was nothing.
    """
    session = Session.of(ctx)
    seconds = parse_duration(timeout)
    queen = session.connect(int(seconds * 1000) + 5000)
    try:
        words = queen.topic(namespace, topic).batch(limit).wait(wait).timeout_millis(int(seconds * 1000))
        items = (words.lease(lease) if lease is not None else words).dequeue()
        for item in items:
            session.out.line(item)
        if ack and items:
            queen.topic(namespace, topic).ack(items)
    finally:
        queen.close()
    if not items:
        raise NothingFound


@command(app, "peek", example="queen topic peek payments refunds --delayed -o table")
def peek(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    limit: Limit = 10,
    delayed: Annotated[bool, typer.Option("--delayed", help="Include items that are not due yet.")] = False,
    leased: Annotated[bool, typer.Option("--leased", help="Leased items instead of waiting ones.")] = False,
) -> None:
    """Show the next items without leasing them."""
    session = Session.of(ctx)
    flags = {"delayed": str(delayed).lower(), "leased": str(leased).lower()}
    answer = _get(session, "/peek", namespace, topic, limit=limit, **flags)
    session.out.rows(answer, _ITEMS, answer)


@command(
    app,
    "ack",
    example="""
queen topic ack payments refunds 375013947392
queen topic dequeue payments refunds | queen topic ack payments refunds --batch -
""",
)
def ack(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    ids: Annotated[list[int] | None, typer.Argument(help="Ids of items.", metavar="ID…")] = None,
    batch: Annotated[Path | None, typer.Option("--batch", help="NDJSON as dequeue prints it; - is stdin.")] = None,
) -> None:
    """Acknowledge items: they are removed."""
    _settle(Session.of(ctx), "ack", namespace, topic, ids, batch)


@command(app, "nack", example="queen topic nack payments refunds 375013947392 --error 'card refused'")
def nack(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    ids: Annotated[list[int] | None, typer.Argument(help="Ids of items.", metavar="ID…")] = None,
    error: Annotated[str | None, typer.Option("--error", help="Why they failed.")] = None,
    dlq: Annotated[bool, typer.Option("--dlq", help="Do not retry them: they are dead letters at once.")] = False,
    batch: Annotated[Path | None, typer.Option("--batch", help="NDJSON as dequeue prints it; - is stdin.")] = None,
) -> None:
    """Report failed items: they are retried later, or become dead letters."""
    at_once = {"dlq": True} if dlq else {}
    _settle(Session.of(ctx), "nack", namespace, topic, ids, batch, error=error or "", **at_once)


@command(app, "extend", example="queen topic extend payments refunds 375013947392 --seconds 300")
def extend(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    ids: Ids,
    seconds: Annotated[float, typer.Option("--seconds", help="Lease time from now.")] = 60,
) -> None:
    """Extend the leases of items."""
    _settle(Session.of(ctx), "extend", namespace, topic, ids, None, seconds=seconds)


@command(app, "release", example="queen topic release payments refunds 375013947392")
def release(ctx: typer.Context, namespace: NamespaceName, topic: TopicName, ids: Ids) -> None:
    """End leases early: the items are ready again, and no retry is counted."""
    _settle(Session.of(ctx), "release", namespace, topic, ids, None)


@command(app, "purge", example="queen topic purge payments refunds --yes")
def purge(ctx: typer.Context, namespace: NamespaceName, topic: TopicName, yes: Yes = False) -> None:
    """Remove all items of a topic."""
    session = Session.of(ctx)
    session.confirm(yes, f"removing the items of {namespace}/{topic}")
    answer = session.queen.request("POST", f"{_PATH}/purge", {"namespace": namespace, "topic": topic})
    session.out.done(f'purged "{namespace}/{topic}": {answer["removed"]} items', answer)


@command(app, "delete", aliases=("rm",), example="queen topic delete payments refunds --yes")
def delete(ctx: typer.Context, namespace: NamespaceName, topic: TopicName, yes: Yes = False) -> None:
    """Delete a topic with its items, dead letters and options."""
    session = Session.of(ctx)
    session.confirm(yes, f"deleting topic {namespace}/{topic}")
    answer = session.queen.request("DELETE", f"{_PATH}?{_query(namespace=namespace, topic=topic)}")
    if not answer["deleted"]:
        session.out.note(f'there was no topic "{namespace}/{topic}"')
        raise NothingFound
    session.out.done(f'deleted "{namespace}/{topic}"', answer)


@command(dlq_app, "list", aliases=("ls",), example="queen topic dlq list payments refunds -o wide")
def list_dead(
    ctx: typer.Context, namespace: NamespaceName, topic: TopicName, limit: Limit = 100, offset: Offset = 0
) -> None:
    """List the dead letters of a topic, the oldest first."""
    session = Session.of(ctx)
    answer = _get(session, "/dlq", namespace, topic, limit=limit, offset=offset)
    session.out.rows(answer, _DEAD, answer)


@command(
    dlq_app,
    "redrive",
    aliases=("retry",),
    example="""
queen topic dlq redrive payments refunds 375013947392
queen topic dlq redrive payments refunds --all
""",
)
def redrive(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    ids: Annotated[list[int] | None, typer.Argument(help="Ids of dead letters.", metavar="ID…")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of the topic.")] = False,
) -> None:
    """Redrive dead letters: they become ready items again."""
    _settle_dead(Session.of(ctx), "dlq/retry", namespace, topic, ids, all_)


@command(dlq_app, "purge", aliases=("delete",), example="queen topic dlq purge payments refunds --all --yes")
def purge_dead(
    ctx: typer.Context,
    namespace: NamespaceName,
    topic: TopicName,
    ids: Annotated[list[int] | None, typer.Argument(help="Ids of dead letters.", metavar="ID…")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of the topic.")] = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters."""
    session = Session.of(ctx)
    session.confirm(yes, f"deleting dead letters of {namespace}/{topic}")
    _settle_dead(session, "dlq/delete", namespace, topic, ids, all_)


@command(quota_app, "list", aliases=("ls",), example="queen topic quota list")
def list_quotas(ctx: typer.Context) -> None:
    """List the quotas of namespaces."""
    session = Session.of(ctx)
    answer = session.admin.get_quotas()
    rows = [{"namespace": namespace, "per_minute": per_minute} for namespace, per_minute in sorted(answer.items())]
    session.out.rows(rows, (Column("NAMESPACE", "namespace"), Column("PER-MINUTE", "per_minute", right=True)), answer)


@command(quota_app, "set", example="queen topic quota set payments 5000")
def set_quota(
    ctx: typer.Context,
    namespace: NamespaceName,
    per_minute: Annotated[int, typer.Argument(min=0, help="Maximum number of enqueued items per minute.")],
) -> None:
    """Limit what a namespace may enqueue."""
    session = Session.of(ctx)
    answer = session.admin.set_quota(namespace, per_minute)
    session.out.done(f'quota of "{namespace}" is {per_minute} a minute', answer)


@command(quota_app, "unset", aliases=("delete", "rm"), example="queen topic quota unset payments")
def unset_quota(ctx: typer.Context, namespace: NamespaceName) -> None:
    """Remove a quota; NAMESPACE_QUOTAS of the server applies again."""
    session = Session.of(ctx)
    session.out.done(f'quota of "{namespace}" is unset', session.admin.set_quota(namespace, None))


@command(mode_app, "list", aliases=("ls",), example="queen topic mode list")
def list_modes(ctx: typer.Context) -> None:
    """List the write modes of namespaces."""
    session = Session.of(ctx)
    answer = session.admin.get_write_modes()
    rows = [{"namespace": namespace, "mode": mode} for namespace, mode in sorted(answer.items())]
    session.out.rows(rows, (Column("NAMESPACE", "namespace"), Column("MODE", "mode")), answer)


@command(mode_app, "set", example="queen topic mode set payments buffered")
def set_mode(
    ctx: typer.Context,
    namespace: NamespaceName,
    mode: Annotated[str, typer.Argument(help="sync, buffered or default.")],
) -> None:
    """Set the write mode of a namespace."""
    if mode not in ("sync", "buffered", "default"):
        raise UserError(f"a write mode must be sync, buffered or default, not {mode!r}")
    session = Session.of(ctx)
    answer = session.admin.set_write_mode(namespace, None if mode == "default" else mode)
    session.out.done(f'write mode of "{namespace}" is {mode}', answer)


def _get(session: Session, path: str, namespace: str, topic: str, **more: Any) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = session.queen.request(
        "GET", f"{_PATH}{path}?{_query(namespace=namespace, topic=topic, **more)}"
    )
    return answer


def _query(**parameters: Any) -> str:
    from urllib.parse import urlencode

    return urlencode(parameters)


def _settle(
    session: Session,
    verb: str,
    namespace: str,
    topic: str,
    ids: list[int] | None,
    batch: Path | None,
    **fields: Any,
) -> None:
    refs: list[dict[str, Any]] = [{"id": one, "namespace": namespace, "topic": topic, **fields} for one in ids or []]
    if batch is not None:
        with opened(batch) as source:
            for number, line in json_lines(source, str(batch)):
                if not isinstance(line, Mapping) or "id" not in line:
                    raise UserError(f"line {number} has no id; give it what queen topic dequeue prints")
                refs.append({"id": line["id"], "namespace": namespace, "topic": topic, **fields})
                if line.get("lease_owner"):
                    refs[-1]["lease_owner"] = line["lease_owner"]
    if not refs:
        raise NothingFound if batch is not None else UserError("name ids of items, or --batch FILE")
    results = session.queen.request("POST", f"{_PATH}/{verb}", refs)
    refused = [result for result in results if not result["success"]]
    done = len(results) - len(refused)
    session.out.done(f"ok={done} failed={len(refused)}", results)
    if refused:
        raise ServerFailed(f"{refused[0]['id']}: {refused[0]['error']}; dequeue it again for a new lease")


def _settle_dead(
    session: Session, verb: str, namespace: str, topic: str, ids: list[int] | None, everything: bool
) -> None:
    if bool(ids) == everything:
        raise UserError("name ids of dead letters, or --all")
    if not everything:
        _settle(session, verb, namespace, topic, ids, None)
        return
    done = 0
    with session.out.progress(verb) as bar:
        while letters := _get(session, "/dlq", namespace, topic, limit=1000, offset=0):
            refs = [{"id": letter["id"], "namespace": namespace, "topic": topic} for letter in letters]
            results = session.queen.request("POST", f"{_PATH}/{verb}", refs)
            succeeded = sum(result["success"] for result in results)
            done += succeeded
            bar.advance(succeeded)
            if not succeeded:
                raise ServerFailed(f"{results[0]['id']}: {results[0]['error']}")
    if not done:
        raise NothingFound
    session.out.done(f"ok={done} failed=0", {"ok": done, "failed": 0})
