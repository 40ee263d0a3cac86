"""`queen push`, `pop`, `ack`, `tx`, `lease` and `replay`: messages themselves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from queen.cli.common.arguments import (
    QUEUE_MODE,
    DryRun,
    Group,
    NeededGroup,
    QueueName,
    complete_queues,
    json_lines,
    opened,
    parse_json,
    source_name,
)
from queen.cli.common.exits import NothingFound, ServerFailed, UserError, telling_progress
from queen.cli.common.output import lookup
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import BEGINNING_WORDS, END_WORDS, iso, parse_duration, parse_time
from queen.cli.common.tree import command, group
from queen.wire.paths import path_of

push_app = group("Push messages to a queue, from stdin, a file or the command line.")
pop_app = group("Take messages from a queue.")
ack_app = group("Acknowledge messages that were popped.")
tx_app = group("Apply acknowledgments and pushes in one transaction.")
lease_app = group("Leases of messages that were popped.")
replay_app = group("Make a group read a queue again from a point in time.")

_SHOWN = (
    "queue",
    "partition",
    "transactionId",
    "partitionId",
    "createdAt",
    "retryCount",
    "data",
    "leaseId",
    "producerSub",
)


@command(
    push_app,
    "push",
    example="""
queen push orders --data '{"order": 7}'
queen push orders -f orders.ndjson --partition-key customer.id
generate | queen push orders --batch 500
""",
)
def push(
    ctx: typer.Context,
    queue: QueueName,
    partition: Annotated[str | None, typer.Option("--partition", help="The partition to push to.")] = None,
    partition_key: Annotated[
        str | None, typer.Option("--partition-key", help="Path in each message that names its partition: a.b")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Messages of one request.")] = 100,
    data: Annotated[str | None, typer.Option("--data", help="One message, as JSON.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="NDJSON: a message on each line; - is stdin.")
    ] = None,
    trace_id: Annotated[str | None, typer.Option("--trace-id", help="Trace id of all messages.")] = None,
    transaction_id: Annotated[
        str | None,
        typer.Option("--transaction-id", help="Transaction id of the first message; repeated, it is stored once."),
    ] = None,
    wrapped: Annotated[
        bool,
        typer.Option("--wrapped", help="Lines are {data, partition?, transactionId?, traceId?}, as pop prints them."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Push messages to a queue, from stdin, a file or the command line.

    Prints how many were queued, were known already, and failed. Exit code 4 when there was no input.
    """
    session = Session.of(ctx)
    if data is not None and file is not None:
        raise UserError("--data and --file exclude each other")
    counts = {"queued": 0, "duplicate": 0, "failed": 0}
    errors: list[str] = []
    common = {"queue": queue, "partition": partition, "traceId": trace_id}
    telling = telling_progress(lambda: 0 if dry_run else sum(counts.values()), "messages were pushed")
    with telling, session.out.progress(f"pushing to {queue}") as bar:
        for items in _batches(_items(data, file, common, partition_key, wrapped), batch):
            if transaction_id is not None:
                items[0]["transactionId"], transaction_id = transaction_id, None
            if dry_run:
                for item in items:
                    session.out.line(item)
                counts["queued"] += len(items)
                continue
            for result in session.queen.request("POST", "/api/v1/push", {"items": items}):
                kind = "queued" if result["status"] == "buffered" else result["status"]
                counts[kind] = counts.get(kind, 0) + 1
                if result.get("error"):
                    errors.append(result["error"])
            bar.advance(len(items))
    if not any(counts.values()):
        raise NothingFound
    if dry_run:
        session.out.note(f"would push {counts['queued']} messages to {queue}")
        return
    session.out.done(" ".join(f"{name}={count}" for name, count in counts.items()), counts)
    if counts["failed"]:
        raise ServerFailed(f"{counts['failed']} messages were refused: {errors[0]}")


@command(
    pop_app,
    "pop",
    example="""
queen pop orders --cg billing -n 10 > batch.ndjson
queen pop orders --auto-ack --timeout 30s
queen pop --namespace billing --task invoices
""",
)
def pop(
    ctx: typer.Context,
    queue: Annotated[
        str | None, typer.Argument(help="The queue; or --namespace and --task.", autocompletion=complete_queues)
    ] = None,
    cg: Group = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Only from this partition.")] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="How many messages to take at most.")] = 1,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="How many to take with one request.")] = None,
    max_partitions: Annotated[int, typer.Option("--max-partitions", min=1, help="Partitions of one request.")] = 1,
    auto_ack: Annotated[bool, typer.Option("--auto-ack", help="Acknowledge on delivery.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the first message.")] = True,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "10s",
    namespace: Annotated[str | None, typer.Option("--namespace", help="From all queues of a namespace.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="From all queues of a task.")] = None,
    from_mode: Annotated[
        str | None, typer.Option("--from-mode", help="Where a new group begins: all, new or new-only.")
    ] = None,
    since: Annotated[str | None, typer.Option("--since", help="Where a new group begins: a time.")] = None,
) -> None:
    """Take messages from a queue.

    Prints a line of JSON for each, which is what [bold]queen ack --batch[/bold] reads. They are leased
    until they are acknowledged. Exit code 4 when there was nothing.
    """
    if queue is None and namespace is None and task is None:
        raise UserError("name a queue, or --namespace or --task: queen pop QUEUE")
    if from_mode not in (None, "all", "new", "new-only"):
        raise UserError(f"--from-mode must be all, new or new-only, not {from_mode}")
    session = Session.of(ctx)
    seconds = parse_duration(timeout)
    queen = session.connect(int(seconds * 1000) + 5000)
    try:
        taken = 0
        while taken < limit:
            parameters: dict[str, Any] = {
                "batch": min(batch or limit, limit - taken),
                "wait": str(wait and taken == 0).lower(),
                "timeout": int(seconds * 1000),
                "consumerGroup": cg,
                "autoAck": str(auto_ack).lower(),
                "partitions": max_partitions,
                "subscriptionMode": from_mode,
                "subscriptionFrom": None if since is None else iso(parse_time(since)),
                "namespace": namespace,
                "task": task,
            }
            messages = popped(queen, queue, partition, parameters)
            for message in messages:
                session.out.line(
                    {key: message[key] for key in _SHOWN if message.get(key) not in (None, "") or key == "data"}
                )
            taken += len(messages)
            if not messages:
                break
    finally:
        queen.close()
    if not taken:
        raise NothingFound


def popped(queen: Any, queue: str | None, partition: str | None, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of one pop, each with its queue."""
    path = "/api/v1/pop" if queue is None else path_of("/api/v1/pop/queue", queue)
    if partition is not None:
        path = path_of(path, "partition", partition)
    asked = urlencode({name: value for name, value in parameters.items() if value is not None})
    answer = queen.request("GET", f"{path}?{asked}") or {}
    return [{"queue": answer.get("queue") or queue, **message} for message in answer.get("messages", [])]


@command(
    ack_app,
    "ack",
    example="""
queen ack t-1 --partition-id 51756565-0000-8000-8000-000000000002 --cg billing
queen ack t-1 --partition-id 51756565-0000-8000-8000-000000000002 --failed --error 'no such customer'
queen pop orders -n 10 | queen ack --batch -
""",
)
def ack(
    ctx: typer.Context,
    transaction_id: Annotated[str | None, typer.Argument(help="The message.")] = None,
    partition_id: Annotated[str | None, typer.Option("--partition-id", help="Its partition.")] = None,
    lease_id: Annotated[str | None, typer.Option("--lease-id", help="Only if this lease is still valid.")] = None,
    cg: Group = None,
    error: Annotated[str | None, typer.Option("--error", help="Why it failed.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="It failed: deliver it again, or make it a dead letter.")
    ] = False,
    batch: Annotated[
        Path | None, typer.Option("--batch", help="NDJSON of messages as pop prints them; - is stdin.")
    ] = None,
) -> None:
    """Acknowledge messages that were popped."""
    session = Session.of(ctx)
    status = "failed" if failed or error is not None else "completed"
    if batch is not None:
        _ack_batch(session, batch, cg, status, error)
        return
    if transaction_id is None or partition_id is None:
        raise UserError("name the message and its partition: queen ack TRANSACTION --partition-id ID, or --batch FILE")
    body = {
        "transactionId": transaction_id,
        "partitionId": partition_id,
        "leaseId": lease_id,
        "status": status,
        "error": error,
        "consumerGroup": cg or QUEUE_MODE,
    }
    (result,) = session.queen.request("POST", "/api/v1/ack", body)
    if not result["success"]:
        raise ServerFailed(f"ack failed: {result['error'] or 'the server refused'}; pop it again for a new lease")
    session.out.done("ack ok", result)


def _ack_batch(session: Session, path: Path, cg: str | None, status: str, error: str | None) -> None:
    counts = {"ok": 0, "failed": 0}
    reasons: list[str] = []
    with opened(path) as file, session.out.progress("acknowledging") as bar:
        for group_ in _batches(
            (_acked(number, line, status, error) for number, line in json_lines(file, str(path))), 1000
        ):
            body = {"acknowledgments": group_, "consumerGroup": cg or QUEUE_MODE}
            for result in session.queen.request("POST", "/api/v1/ack/batch", body):
                counts["ok" if result["success"] else "failed"] += 1
                if not result["success"]:
                    reasons.append(str(result["error"]))
            bar.advance(len(group_))
    if not any(counts.values()):
        raise NothingFound
    session.out.done(f"ok={counts['ok']} failed={counts['failed']}", counts)
    if counts["failed"]:
        raise ServerFailed(f"{counts['failed']} were not acknowledged: {reasons[0]}")


def _acked(number: int, line: Any, status: str, error: str | None) -> dict[str, Any]:
    if not isinstance(line, Mapping) or not line.get("transactionId") or not line.get("partitionId"):
        raise UserError(f"line {number} has no transactionId and partitionId; give it what queen pop prints")
    one = {"transactionId": line["transactionId"], "partitionId": line["partitionId"], "status": status, "error": error}
    return {**one, "leaseId": line["leaseId"]} if line.get("leaseId") else one


@command(tx_app, "tx", example="queen tx -f bundle.json\nqueen tx -f - --dry-run < bundle.json")
def tx(
    ctx: typer.Context,
    file: Annotated[Path, typer.Option("-f", "--file", help="JSON: {operations: [push and ack …]}; - is stdin.")],
    dry_run: DryRun = False,
) -> None:
    """Apply acknowledgments and pushes in one transaction."""
    session = Session.of(ctx)
    with opened(file) as source:
        bundle = parse_json(source.read(), source_name(file))
    if not isinstance(bundle, Mapping) or not isinstance(bundle.get("operations"), list) or not bundle["operations"]:
        raise UserError(f"{source_name(file)} must be an object with a list of operations that is not empty")
    if dry_run:
        kinds = [str(lookup(operation, "type")) for operation in bundle["operations"]]
        session.out.done(f"would apply {len(kinds)} operations: {', '.join(kinds)}", bundle)
        return
    answer = check_answer(session.queen.request("POST", "/api/v1/transaction", bundle))
    session.out.done("transaction committed", answer)


@command(lease_app, "extend", example="queen lease extend 01a1e412-af91-7000-8000-00000023a614 --seconds 120")
def extend(
    ctx: typer.Context,
    lease_id: Annotated[str, typer.Argument(help="The lease, as pop prints it.")],
    seconds: Annotated[int, typer.Option("--seconds", min=1, help="Minimum lease time from now.")] = 60,
) -> None:
    """Extend a lease."""
    session = Session.of(ctx)
    path = path_of("/api/v1/lease", lease_id, "extend")
    answer = check_answer(session.queen.request("POST", path, {"seconds": seconds}))
    session.out.done(f"renewed {lease_id} -> {answer.get('newExpiresAt') or answer.get('expiresAt')}", answer)


# A group of one command would be taken for the command itself.
@lease_app.callback()
def _lease() -> None:
    """Leases of messages that were popped."""


@command(
    replay_app,
    "replay",
    example="""
queen replay orders --cg billing --to '2h ago'
queen replay orders --cg billing --to beginning --dry-run
""",
)
def replay(
    ctx: typer.Context,
    queue: QueueName,
    cg: NeededGroup,
    to: Annotated[str, typer.Option("--to", help="A time, beginning, or end.")],
    dry_run: DryRun = False,
) -> None:
    """Make a group read a queue again from a point in time."""
    seek_group(Session.of(ctx), cg, queue, to, dry_run, "replayed")


def seek_body(to: str | None, offset: int | None) -> tuple[dict[str, Any], str]:
    """The target of a seek (an offset, the end, the beginning or a time), and its description."""
    if (to is None) == (offset is None):
        raise UserError("say where to: either --to or --offset")
    if to is None:
        return {"offset": offset}, f"offset {offset}"
    word = to.strip().lower()
    if word in END_WORDS:
        return {"toEnd": True}, "end"
    if word in BEGINNING_WORDS:
        return {"toBeginning": True}, "beginning"
    timestamp = iso(parse_time(to))
    return {"timestamp": timestamp}, timestamp


def preview_seek(session: Session, cg: str, queue: str, body: Mapping[str, Any], what: str, **more: Any) -> None:
    """Say what a seek would do."""
    answer = check_answer(session.admin.preview_seek(cg, queue, **body, **more))
    effect = f"redelivered={answer['redelivered']} skipped={answer['skipped']} leases={answer['leases']}"
    session.out.done(f"dry run: {what} {effect}", answer)


def seek_group(
    session: Session, cg: str, queue: str, to: str | None, dry_run: bool, verb: str, offset: int | None = None
) -> None:
    """Move a group on a queue: to its end, its beginning, an offset, or a time."""
    body, place = seek_body(to, offset)
    if dry_run:
        preview_seek(session, cg, queue, body, f"{verb} cg={cg} queue={queue} to={place}")
        return
    answer = check_answer(session.admin.seek_consumer_group(cg, queue, body))
    if not (count := answer["partitionsUpdated"]):
        session.out.note(f"nothing was moved: group {cg!r} has no position on queue {queue!r}")
        raise NothingFound
    session.out.done(f"{verb} cg={cg} queue={queue} to={place} partitions={count}", answer)


def _items(
    data: str | None, file: Path | None, common: Mapping[str, Any], partition_key: str | None, wrapped: bool
) -> Iterator[dict[str, Any]]:
    given = {name: value for name, value in common.items() if value is not None}
    for number, value in _values(data, file):
        item = {**given, "payload": value}
        if wrapped:
            if not isinstance(value, Mapping) or ("data" not in value and "payload" not in value):
                raise UserError(f"line {number} has no data; with --wrapped each line is {{data, partition?, …}}")
            item["payload"] = value["data"] if "data" in value else value["payload"]
            item.update({key: value[key] for key in ("partition", "transactionId", "traceId") if value.get(key)})
        if partition_key is not None:
            name = lookup(item["payload"], partition_key)
            if name is None:
                raise UserError(f"line {number} has nothing at {partition_key}, which names its partition")
            item["partition"] = str(name)
        # An id of our own: a request whose answer was lost is repeated without harm.
        item.setdefault("transactionId", str(uuid.uuid4()))
        yield item


def _values(data: str | None, file: Path | None) -> Iterator[tuple[int, Any]]:
    if data is not None:
        yield 1, parse_json(data, "--data")
        return
    with opened(file) as source:
        yield from json_lines(source, source_name(file))


def _batches(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    gathered: list[Any] = []
    for item in items:
        gathered.append(item)
        if len(gathered) == size:
            yield gathered
            gathered = []
    if gathered:
        yield gathered
