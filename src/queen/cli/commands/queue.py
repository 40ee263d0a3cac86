"""`queen queue`, `partition`, `namespace` and `task`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from queen.cli.commands.messaging import preview_seek, seek_body
from queen.cli.common.arguments import (
    DryRun,
    Namespace,
    NeededGroup,
    Offset,
    Partition,
    QueueName,
    Since,
    Task,
    Until,
    Yes,
    json_lines,
    opened,
    source_name,
    writer,
)
from queen.cli.common.exits import NothingFound, ServerFailed, UserError
from queen.cli.common.log import positions, read_log
from queen.cli.common.output import Column
from queen.cli.common.printable import json_text
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import optional_time, parse_time
from queen.cli.common.tree import command, group

app = group("Queues: list, describe, configure, pause, resume, clear, delete, export, import.")
partition_app = group("Partitions of queues.")
namespace_app = group("Namespaces of queues.")
task_app = group("Tasks of queues.")

Limit = Annotated[int | None, typer.Option("-n", "--limit", min=1, help="Maximum number. [all]")]
PartitionName = Annotated[str, typer.Argument(help="The partition.", metavar="PARTITION")]

_LIST = (
    Column("NAME", "name"),
    Column("NAMESPACE", "namespace"),
    Column("TASK", "task"),
    Column("PARTITIONS", "partitions", right=True),
    Column("PENDING", "messages.pending", right=True),
    Column("PRIORITY", "options.priority", right=True),
    Column("LEASE", lambda row: f"{row['options']['leaseTime']}s", right=True),
    Column("PAUSED", "paused", wide=True),
    Column("RETRY", "options.retryLimit", wide=True, right=True),
    Column("MAXSIZE", "options.maxSize", wide=True, right=True),
    Column("ENCRYPTED", "options.encryptionEnabled", wide=True),
    Column("CREATED", "createdAt", wide=True),
)
_PARTITIONS = (
    Column("PARTITION", "name"),
    Column("PENDING", "stats.pending", right=True),
    Column("PROCESSING", "stats.processing", right=True),
    Column("COMPLETED", "stats.completed", wide=True, right=True),
    Column("FAILED", "stats.failed", wide=True, right=True),
    Column("DLQ", "stats.deadLetter", wide=True, right=True),
    Column("TOTAL", "stats.total", wide=True, right=True),
    Column("MESSAGES", "stats.total", wide=True, right=True),
    Column("NEWEST", "newestMessage", wide=True),
    Column("ID", "id", wide=True),
)

_SORTS: Final = ("created", "name", "partitions", "stored", "pending", "density", "lag")

OPTION_FLAGS: Final = {
    "leaseTime": "lease_time",
    "retryLimit": "retry_limit",
    "retryDelay": "retry_delay",
    "priority": "priority",
    "delayedProcessing": "delayed_processing",
    "windowBuffer": "window_buffer",
    "maxSize": "max_size",
    "ttl": "ttl",
    "retentionSeconds": "retention",
    "completedRetentionSeconds": "completed_retention",
    "retentionEnabled": "retention_enabled",
    "encryptionEnabled": "encrypt",
    "maxWaitTimeSeconds": "max_wait_time",
    "deadLetterQueue": "dead_letter_queue",
    "dlqAfterMaxRetries": "dlq_after_max_retries",
    "dedupWindowSeconds": "dedup_window",
}
"""Options of a queue, and the flags of `queen queue configure` for them."""


@command(
    app,
    "list",
    aliases=("ls",),
    example="""
queen queue list
queen queue list --namespace billing -o wide
queen queue list --search order --sort pending -n 10
""",
)
def list_queues(
    ctx: typer.Context,
    namespace: Namespace = None,
    task: Task = None,
    search: Annotated[str | None, typer.Option("--search", help="Only with this text in the name.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help=f"{', '.join(_SORTS)}. [created]")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    limit: Limit = None,
    offset: Offset = 0,
) -> None:
    """List queues, the newest or largest first, or by name."""
    if sort is not None and sort not in _SORTS:
        raise UserError(f"--sort must be one of {', '.join(_SORTS)}, not {sort!r}")
    session = Session.of(ctx)
    asked: dict[str, Any] = {"namespace": namespace, "task": task, "search": search, "sort": sort}
    if reverse:
        asked["order"] = "desc" if sort == "name" else "asc"
    pages = session.pages(
        lambda limit, offset: session.admin.list_queues(**asked, limit=limit, offset=offset),
        "queues",
        None if limit is None else offset + limit,
    )
    page = list(pages)[offset:]
    rows = [{**queue, "options": queue.get("options") or queue_options(session, queue["name"])} for queue in page]
    session.out.rows(rows, _LIST, {"queues": page})


@command(app, "describe", aliases=("get", "show"), example="queen queue describe orders")
def describe(ctx: typer.Context, queue: QueueName) -> None:
    """Show a queue: its options, partitions and what they hold."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.get_queue(queue))
    session.out.value({**answer, "options": queue_options(session, queue)})


@command(
    app,
    "configure",
    aliases=("create", "set"),
    example="""
queen queue configure orders --lease-time 60 --retry-limit 0
queen queue configure orders --namespace billing --retention 86400 --retention-enabled
queen queue configure orders --reset --priority 5
""",
)
def configure(
    ctx: typer.Context,
    queue: QueueName,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Its namespace.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Its task.")] = None,
    lease_time: Annotated[int | None, typer.Option("--lease-time", min=0, help="Seconds of a lease. [300]")] = None,
    retry_limit: Annotated[
        int | None, typer.Option("--retry-limit", min=0, help="Retries before a message is a dead letter. [3]")
    ] = None,
    retry_delay: Annotated[
        int | None, typer.Option("--retry-delay", min=0, help="Milliseconds before a retry. [1000]")
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, help="Higher is popped first among queues. [0]")
    ] = None,
    delayed_processing: Annotated[
        int | None, typer.Option("--delayed-processing", min=0, help="Seconds before a message can be popped. [0]")
    ] = None,
    window_buffer: Annotated[
        int | None, typer.Option("--window-buffer", min=0, help="Seconds to gather messages. [0]")
    ] = None,
    max_size: Annotated[
        int | None, typer.Option("--max-size", min=0, help="Messages it may hold; 0: any number. [0]")
    ] = None,
    ttl: Annotated[
        int | None, typer.Option("--ttl", min=0, help="Seconds after which a message expires. [never]")
    ] = None,
    retention: Annotated[
        int | None, typer.Option("--retention", min=0, help="Seconds messages are kept; 0: forever. [0]")
    ] = None,
    completed_retention: Annotated[
        int | None, typer.Option("--completed-retention", min=0, help="Seconds consumed messages are kept. [0]")
    ] = None,
    retention_enabled: Annotated[
        bool | None, typer.Option("--retention-enabled/--no-retention", help="Whether retention is on.")
    ] = None,
    encrypt: Annotated[bool | None, typer.Option("--encrypt/--no-encrypt", help="Encrypt payloads.")] = None,
    max_wait_time: Annotated[
        int | None,
        typer.Option("--max-wait-time", min=0, help="Seconds a message may wait before it is evicted; 0: forever. [0]"),
    ] = None,
    dead_letter_queue: Annotated[
        bool | None,
        typer.Option(
            "--dead-letter-queue/--no-dead-letter-queue",
            help="Stored for clients that read it; dead letters are always kept.",
        ),
    ] = None,
    dlq_after_max_retries: Annotated[
        bool | None,
        typer.Option("--dlq-after-max-retries/--no-dlq-after-max-retries", help="Like the previous option."),
    ] = None,
    dedup_window: Annotated[
        int | None, typer.Option("--dedup-window", min=0, help="Seconds a transaction id is remembered. [the server's]")
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Reset options that are not given to their defaults.")] = False,
) -> None:
    """Make a queue, or change some of its options; those that are not named stay.

    A value of 0 is a value: [bold]--retry-limit 0[/bold] makes the first failure a dead letter.
    """
    given = dict(locals())
    session = Session.of(ctx)
    options = {name: given[flag] for name, flag in OPTION_FLAGS.items() if given[flag] is not None}
    if "retentionSeconds" in options or "completedRetentionSeconds" in options:
        # Retention without its switch would do nothing: naming a time means it.
        options.setdefault("retentionEnabled", True)
    present = None if reset else queue_settings(session, queue)
    if present is not None:
        options = {**{name: value for name, value in present["options"].items() if value is not None}, **options}
        namespace = present["namespace"] if namespace is None else namespace
        task = present["task"] if task is None else task
    answer = check_answer(session.admin.configure_queue(queue, options, namespace or "", task or ""))
    session.out.done(f'configured "{queue}"', answer)


def queue_settings(session: Session, name: str) -> dict[str, Any] | None:
    """Namespace, task and options of a queue as they are stored; None when there is no such queue."""
    from queen.client.errors import NotFoundError

    try:
        found: dict[str, Any] = session.admin.get_queue_detail(name)["queue"]
    except NotFoundError:
        return None
    if "options" not in found:
        raise ServerFailed("the server is too old to show the options of a queue; upgrade it")
    return found


def queue_options(session: Session, name: str) -> dict[str, Any]:
    """The options of a queue that exists."""
    options: dict[str, Any] = session.admin.get_queue_detail(name)["queue"].get("options", {})
    return options


@command(app, "delete", aliases=("rm",), example="queen queue delete orders --yes")
def delete(ctx: typer.Context, queue: QueueName, yes: Yes = False) -> None:
    """Delete a queue with everything in it."""
    session = Session.of(ctx)
    session.confirm(yes, f"deleting queue {queue} with its messages")
    answer = check_answer(session.admin.delete_queue(queue))
    if not answer.get("existed", True):
        session.out.note(f'there was no queue "{queue}"')
        raise NothingFound
    session.out.done(f'deleted "{queue}"', answer)


@command(app, "clear", example="queen queue clear orders --yes\nqueen queue clear orders --partition p1 --yes")
def clear(ctx: typer.Context, queue: QueueName, partition: Partition = None, yes: Yes = False) -> None:
    """Remove the messages of a queue; the queue, its options and its groups stay."""
    session = Session.of(ctx)
    session.confirm(yes, f"removing the messages of {queue}" + (f"/{partition}" if partition else ""))
    answer = check_answer(session.admin.clear_queue(queue, partition))
    session.out.done(f'cleared "{queue}": {answer["messages"]} messages', answer)


@command(app, "pause", example="queen queue pause orders")
def pause(ctx: typer.Context, queue: QueueName) -> None:
    """Stop delivering messages of a queue; pushes are stored as before."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.pause_queue(queue))
    session.out.done(f'paused "{queue}"' + ("" if answer["changed"] else ", as it was"), answer)


@command(app, "resume", example="queen queue resume orders")
def resume(ctx: typer.Context, queue: QueueName) -> None:
    """Deliver messages of a queue again; waiting pops are served at once."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.resume_queue(queue))
    session.out.done(f'resumed "{queue}"' + ("" if answer["changed"] else ", which was not paused"), answer)


@command(app, "stats", example="queen queue stats --namespace billing")
def stats(ctx: typer.Context, namespace: Namespace = None, task: Task = None) -> None:
    """Show the counters of queues."""
    session = Session.of(ctx)
    session.out.value(session.admin.get_queue_stats(namespace=namespace, task=task))


@command(
    app,
    "export",
    example="""
queen queue export orders > orders.ndjson
queen queue export orders --from '1d ago' --partition p1 -f p1.ndjson
""",
)
def export(
    ctx: typer.Context,
    queue: QueueName,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Where to; stdout by default.")] = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
) -> None:
    """Write the messages of a queue as NDJSON; nothing is consumed.

    Partition by partition, each in order. [bold]queen queue import[/bold] reads it.
    """
    session = Session.of(ctx)
    start = None if since is None or parse_time(since).timestamp() == 0 else optional_time(since)
    end = None if until is None else parse_time(until)
    total = sum(place["nextOffset"] - place["firstOffset"] for place in positions(session, queue, partition))
    written = 0
    bar = session.out.progress(f"exporting {queue}", total, beside_lines=file is None)
    with writer(file) as target, bar:
        for message in read_log(session, queue, partition, start, end):
            target.write(json_text(message) + "\n")
            written += 1
            bar.advance()
    session.out.note(f"exported {written} messages of {queue}")
    if not written:
        raise NothingFound


@command(
    app,
    "import",
    example="queen queue import orders -f orders.ndjson\nqueen queue export a | queen queue import b -f -",
)
def import_(
    ctx: typer.Context,
    queue: QueueName,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="NDJSON as export writes it; stdin by default.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Messages of one request.")] = 1000,
) -> None:
    """Push the messages of an export: partitions, order, transaction and trace ids stay, ids and times are new.

    Repeated, it stores nothing twice as long as the transaction ids are remembered.
    """
    session = Session.of(ctx)
    counts = {"queued": 0, "duplicate": 0, "failed": 0}
    errors: list[str] = []

    def send(items: list[dict[str, Any]]) -> None:
        for result in session.queen.request("POST", "/api/v1/push", {"items": items}):
            kind = "queued" if result["status"] == "buffered" else result["status"]
            counts[kind] += 1
            if result.get("error"):
                errors.append(result["error"])

    waiting: list[dict[str, Any]] = []
    with opened(file) as source, session.out.progress(f"importing {queue}") as bar:
        for number, line in json_lines(source, source_name(file)):
            if not isinstance(line, Mapping) or "data" not in line:
                raise UserError(f"line {number} has no data; give it what queen queue export writes")
            item = {"queue": queue, "payload": line["data"]}
            item.update({key: line[key] for key in ("partition", "transactionId", "traceId") if line.get(key)})
            waiting.append(item)
            if len(waiting) == batch:
                send(waiting)
                bar.advance(len(waiting))
                waiting = []
        if waiting:
            send(waiting)
    if not any(counts.values()):
        raise NothingFound
    session.out.done(" ".join(f"{name}={count}" for name, count in counts.items()), counts)
    if errors:
        raise ServerFailed(f"{counts['failed']} messages were refused: {errors[0]}")


@command(partition_app, "list", aliases=("ls",), example="queen partition list orders -o wide")
def list_partitions(ctx: typer.Context, queue: QueueName) -> None:
    """List the partitions of a queue."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.get_queue_detail(queue))
    session.out.rows(answer["partitions"], _PARTITIONS, answer)


@command(partition_app, "describe", aliases=("get", "show"), example="queen partition describe orders p1")
def describe_partition(ctx: typer.Context, queue: QueueName, partition: PartitionName) -> None:
    """Show a partition: its counters, its offsets, and its newest messages."""
    session = Session.of(ctx)
    detail = check_answer(session.admin.get_queue_detail(queue))
    found = next((one for one in detail["partitions"] if one["name"] == partition), None)
    if found is None:
        names = ", ".join(one["name"] for one in detail["partitions"][:10])
        raise ServerFailed(f"queue {queue} has no partition {partition!r}; it has {names}")
    (place,) = positions(session, queue, partition)
    newest = session.admin.list_messages(queue=queue, partition=partition, limit=50, **{"from": "1970-01-01T00:00:00Z"})
    session.out.value(
        {
            **found,
            "offsets": {key: place[key] for key in ("firstOffset", "nextOffset")},
            "messages": newest["messages"],
        }
    )


@command(
    partition_app,
    "seek",
    example="""
queen partition seek orders p1 --cg billing --to end
queen partition seek orders p1 --cg billing --offset 1200
""",
)
def seek_partition(
    ctx: typer.Context,
    queue: QueueName,
    partition: PartitionName,
    cg: NeededGroup,
    to: Annotated[str | None, typer.Option("--to", help="A time, beginning, or end.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="An offset.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Move a group on one partition; its lease there ends."""
    session = Session.of(ctx)
    body, place = seek_body("end" if to is None and offset is None else to, offset)
    what = f"seek cg={cg} partition={partition} to={place}"
    if dry_run:
        preview_seek(session, cg, queue, body, what, partition=partition)
        return
    session.out.done(what, check_answer(session.admin.seek_partition(cg, queue, partition, body)))


@partition_app.callback()
def _partition() -> None:
    """Partitions of queues."""


@command(namespace_app, "list", aliases=("ls",), example="queen namespace list")
def list_namespaces(ctx: typer.Context) -> None:
    """List the namespaces of queues."""
    _labels(Session.of(ctx), "namespaces", "namespace", "NAMESPACE", "tasks", "TASKS", "task")


@command(task_app, "list", aliases=("ls",), example="queen task list -o wide")
def list_tasks(ctx: typer.Context) -> None:
    """List the tasks of queues."""
    _labels(Session.of(ctx), "tasks", "task", "TASK", "namespaces", "NAMESPACES", "namespace")


def _labels(session: Session, key: str, name: str, heading: str, others: str, other_heading: str, other: str) -> None:
    answer = session.admin.get_namespaces() if key == "namespaces" else session.admin.get_tasks()
    queues = session.admin.list_queues()["queues"]
    rows = [
        {**row, others: len({queue[other] for queue in queues if queue[name] == row[name] and queue[other]})}
        for row in answer[key]
    ]
    columns = (
        Column(heading, name),
        Column("QUEUES", "queues", right=True),
        Column("PENDING", "messages.pending", right=True),
        Column(other_heading, others, wide=True, right=True),
        Column("PARTITIONS", "partitions", wide=True, right=True),
    )
    session.out.rows(rows, columns, answer)


# A group of one command would be taken for the command itself.
@namespace_app.callback()
def _namespace() -> None:
    """Namespaces of queues."""


@task_app.callback()
def _task() -> None:
    """Tasks of queues."""
