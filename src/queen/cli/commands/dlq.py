"""`queen dlq`: dead letters of queues."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from queen.cli.common.arguments import (
    DryRun,
    Limit,
    Offset,
    Partition,
    QueueName,
    Since,
    Until,
    Yes,
    complete_queues,
    parse_json,
    writer,
)
from queen.cli.common.exits import NothingFound, ServerFailed, UserError, telling_progress
from queen.cli.common.output import Column
from queen.cli.common.printable import json_text
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import optional_time
from queen.cli.common.tree import command, group

app = group("Dead letters: list, report, redrive, edit, export and purge them.")

Queue = Annotated[str | None, typer.Option("--queue", help="Only of this queue.", autocompletion=complete_queues)]
Cg = Annotated[str | None, typer.Option("--cg", "--group", help="Only of this consumer group.")]
Tx = Annotated[list[str] | None, typer.Option("--tx", help="Only of this transaction id; may be repeated.")]
PartitionId = Annotated[
    str, typer.Argument(help="The id of the partition, as list -o wide prints it.", metavar="PARTITION_ID")
]
TransactionId = Annotated[str, typer.Argument(help="The transaction id of the message.", metavar="TRANSACTION_ID")]

_AT_ONCE = 1000
_LIST = (
    Column("TX", "transactionId"),
    Column("QUEUE", "queue"),
    Column("PARTITION", "partition"),
    Column("CG", "consumerGroup"),
    Column("RETRIES", "retryCount", right=True),
    Column("ERROR", "errorMessage"),
    Column("FAILED-AT", "failedAt", wide=True),
    Column("PARTITIONID", "partitionId", wide=True),
)
_REASONS = (
    Column("COUNT", "count", right=True),
    Column("QUEUE", "queue"),
    Column("CG", "consumerGroup"),
    Column("ERROR", "error"),
    Column("LAST", "lastAt"),
    Column("FIRST", "firstAt", wide=True),
    Column("RETRIES", "maxRetries", wide=True, right=True),
    Column("TX", "transactionId", wide=True),
)


@command(
    app,
    "list",
    aliases=("ls",),
    example="""
queen dlq list --queue orders
queen dlq list --queue orders --cg billing --from '1d ago' -o wide
""",
)
def list_dead_letters(
    ctx: typer.Context,
    queue: Queue = None,
    cg: Cg = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Maximum number.")] = 100,
    offset: Offset = 0,
) -> None:
    """List dead letters, the latest failure first."""
    session = Session.of(ctx)
    found = list(_dead_letters(session, queue, cg, partition, since, until, offset + limit))[offset:]
    session.out.rows(found, _LIST)


@command(
    app,
    "report",
    example="queen dlq report\nqueen dlq report --queue orders --from '1d ago' -n 10",
)
def report(
    ctx: typer.Context,
    queue: Queue = None,
    cg: Cg = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="Maximum number.")] = 50,
) -> None:
    """Group dead letters by error, the most frequent first; errors that differ only in numbers and ids are one."""
    session = Session.of(ctx)
    asked = {
        "queue": queue,
        "consumerGroup": cg,
        "partition": partition,
        "from": optional_time(since),
        "to": optional_time(until),
    }
    answer = check_answer(session.admin.get_dead_letter_report(**asked, limit=limit))
    session.out.rows(answer["reasons"], _REASONS, answer)


@command(
    app, "describe", aliases=("get", "show"), example="queen dlq describe 51756565-0000-8000-8000-000000000002 t-1"
)
def describe(ctx: typer.Context, partition_id: PartitionId, transaction_id: TransactionId) -> None:
    """Show everything about the message of a dead letter."""
    session = Session.of(ctx)
    session.out.value(check_answer(session.admin.get_message(partition_id, transaction_id)))


@command(
    app,
    "redrive",
    aliases=("retry", "requeue"),
    example="""
queen dlq redrive orders
queen dlq redrive orders --cg billing --from '1h ago' --limit 100
queen dlq redrive orders --tx t-1 --tx t-2 --dry-run
""",
)
def redrive(
    ctx: typer.Context,
    queue: QueueName,
    cg: Cg = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
    tx: Tx = None,
    limit: Limit = None,
    dry_run: DryRun = False,
) -> None:
    """Redrive dead letters: their messages are stored at the tails of their partitions, and the dead letters removed.

    Exit code 4 when there is none.
    """
    session = Session.of(ctx)
    if dry_run:
        found = _chosen(session, queue, cg, partition, since, until, tx, limit)
        session.out.rows(found, _LIST)
        session.out.note(f"would redrive {len(found)} dead letters of {queue}")
        if not found:
            raise NothingFound
        return
    selection = _selection(cg, partition, since, until, tx)
    done, answer = 0, {}
    with session.out.progress(f"redriving {queue}", limit) as bar:
        while limit is None or done < limit:
            wanted = _AT_ONCE if limit is None else min(_AT_ONCE, limit - done)
            answer = check_answer(session.admin.retry_dead_letters(queue, **selection, limit=wanted))
            done += answer["retried"]
            bar.update(completed=done, total=done + answer["remaining"])
            if not answer["retried"] or not answer["remaining"]:
                break
    if not done:
        raise NothingFound
    session.out.done(f"redriven={done} remaining={answer['remaining']}", {**answer, "retried": done})


@command(
    app,
    "edit",
    example="""
queen dlq edit 51756565-0000-8000-8000-000000000002 t-1
queen dlq edit 51756565-0000-8000-8000-000000000002 t-1 --data '{"order": 7, "currency": "EUR"}'
""",
)
def edit(
    ctx: typer.Context,
    partition_id: PartitionId,
    transaction_id: TransactionId,
    data: Annotated[str | None, typer.Option("--data", help="The new data as JSON, instead of an editor.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the dead letter as well.")] = False,
) -> None:
    """Correct the data of a dead letter in $EDITOR, push it as a new message, and remove the dead letter."""
    session = Session.of(ctx)
    message = check_answer(session.admin.get_message(partition_id, transaction_id))
    if message["status"] != "dead_letter":
        raise ServerFailed(f"{transaction_id} is {message['status']} and no dead letter; queen dlq list shows them")
    new = parse_json(data, "--data") if data is not None else _edited(message["payload"])
    if data is None and new == message["payload"]:
        session.out.note("nothing was changed")
        raise NothingFound
    queue, partition = message["queue"], message["partition"]
    item = {
        "queue": queue,
        "partition": partition,
        "payload": new,
        "transactionId": f"{transaction_id}~{uuid.uuid4().hex[:8]}",
    }
    if message["traceId"]:
        item["traceId"] = message["traceId"]
    (result,) = session.queen.request("POST", "/api/v1/push", {"items": [item]})
    if result["status"] not in ("queued", "buffered"):
        raise ServerFailed(f"the new message was refused: {result.get('error') or result['status']}")
    if not keep:
        session.admin.purge_dead_letters(queue, partition=partition, transactionIds=[transaction_id])
    session.out.done(f"pushed {item['transactionId']} to {queue}/{partition}", result)


@command(
    app, "export", example="queen dlq export orders > dead.ndjson\nqueen dlq export orders --cg billing -f dead.ndjson"
)
def export(
    ctx: typer.Context,
    queue: QueueName,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="Where to; stdout by default.")] = None,
    cg: Cg = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
) -> None:
    """Write dead letters as NDJSON, with their data, errors and times."""
    session = Session.of(ctx)
    count = 0
    bar = session.out.progress(f"exporting dead letters of {queue}", beside_lines=file is None)
    with writer(file) as target, bar:
        for letter in _dead_letters(session, queue, cg, partition, since, until, None):
            target.write(json_text(letter) + "\n")
            count += 1
            bar.advance()
    session.out.note(f"exported {count} dead letters of {queue}")
    if not count:
        raise NothingFound


@command(app, "purge", example="queen dlq purge orders --yes\nqueen dlq purge orders --to '30d ago' --yes")
def purge(
    ctx: typer.Context,
    queue: QueueName,
    cg: Cg = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
    tx: Tx = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters; their messages stay in their partitions."""
    session = Session.of(ctx)
    if dry_run:
        found = _chosen(session, queue, cg, partition, since, until, tx, None)
        session.out.done(f"would delete {len(found)} dead letters of {queue}")
        if not found:
            raise NothingFound
        return
    session.confirm(yes, f"deleting dead letters of {queue}")
    answer = check_answer(session.admin.purge_dead_letters(queue, **_selection(cg, partition, since, until, tx)))
    session.out.done(f"deleted={answer['deleted']}", answer)
    if not answer["deleted"]:
        raise NothingFound


@command(app, "drain", example="queen dlq drain --queue orders --dry-run\nqueen dlq drain --queue orders --yes")
def drain(
    ctx: typer.Context,
    queue: Queue = None,
    cg: Cg = None,
    partition: Partition = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete dead letters together with their messages and traces."""
    from queen.client.errors import NotFoundError

    session = Session.of(ctx)
    found = list(_dead_letters(session, queue, cg, partition, since, until, limit))
    if not found:
        raise NothingFound
    # A message may be a dead letter of several groups; they go with it.
    messages = dict.fromkeys((letter["partitionId"], letter["transactionId"]) for letter in found)
    if dry_run:
        session.out.rows(found, _LIST)
        session.out.note(f"would delete {len(messages)} messages")
        return
    session.confirm(yes, f"deleting {len(messages)} messages")
    counts = {"processed": 0, "errors": 0}
    telling = telling_progress(lambda: counts["processed"], "messages were deleted")
    with telling, session.out.progress("draining", len(messages)) as bar:
        for message in messages:
            # Retention, or another drain, may have deleted it since.
            with contextlib.suppress(NotFoundError):
                check_answer(session.admin.delete_message(*message))
            counts["processed"] += 1
            bar.advance()
    session.out.done(f"processed={counts['processed']} errors={counts['errors']}", counts)


def _dead_letters(
    session: Session,
    queue: str | None,
    cg: str | None,
    partition: str | None,
    since: str | None,
    until: str | None,
    limit: int | None,
) -> Iterator[dict[str, Any]]:
    asked = {"queue": queue, "consumerGroup": cg, "partition": partition}
    asked.update({"from": optional_time(since), "to": optional_time(until)})
    return session.pages(
        lambda limit, offset: session.admin.list_dead_letters(**asked, limit=limit, offset=offset), "messages", limit
    )


def _chosen(
    session: Session,
    queue: str,
    cg: str | None,
    partition: str | None,
    since: str | None,
    until: str | None,
    tx: list[str] | None,
    limit: int | None,
) -> list[dict[str, Any]]:
    letters = _dead_letters(session, queue, cg, partition, since, until, None if tx else limit)
    return [letter for letter in letters if not tx or letter["transactionId"] in tx][:limit]


def _selection(
    cg: str | None, partition: str | None, since: str | None, until: str | None, tx: list[str] | None
) -> dict[str, Any]:
    return {
        "consumerGroup": cg,
        "partition": partition,
        "from": optional_time(since),
        "to": optional_time(until),
        "transactionIds": tx or None,
    }


def _edited(payload: Any) -> Any:
    """The payload as a person leaves it in an editor."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with contextlib.ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="queen-"))
        stack.callback(shutil.rmtree, directory)
        path = directory / "message.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(payload), indent=2))
        try:
            ended = subprocess.run([*shlex.split(editor), str(path)], check=False)
        except OSError as error:
            raise UserError(
                f"the editor {editor} cannot be started: {error.strerror}; set EDITOR, or pass --data"
            ) from error
        if ended.returncode:
            raise UserError(f"the editor {editor} ended with {ended.returncode}; nothing was changed")
        try:
            return parse_json(path.read_bytes(), "the edited text")
        except UserError as error:
            # What was written is not lost for a comma.
            stack.pop_all()
            raise UserError(f"{error}; it is kept in {path}") from None
