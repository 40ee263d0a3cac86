"""`queen messages`: single messages."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from queen.cli.commands.trace import MESSAGE_TRACES
from queen.cli.common.arguments import Offset, Partition, QueueName, Since, Until, Yes, complete_queues
from queen.cli.common.exits import NothingFound, UserError
from queen.cli.common.filters import Grep, Where, is_pattern, message_filter
from queen.cli.common.output import Column
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import optional_time
from queen.cli.common.tree import command, group

app = group("Look at single messages, search and delete them.")

PartitionId = Annotated[
    str, typer.Argument(help="The id of the partition, as pop and list print it.", metavar="PARTITION_ID")
]
TransactionId = Annotated[str, typer.Argument(help="The transaction id of the message.", metavar="TRANSACTION_ID")]

_STATUSES = ("pending", "processing", "completed", "dead_letter")
_LIST = (
    Column("TX", "transactionId"),
    Column("QUEUE", "queue"),
    Column("PARTITION", "partition"),
    Column("STATUS", "status"),
    Column("CONSUMED", lambda row: f"{row['busStatus']['consumedBy']}/{row['busStatus']['totalGroups']}"),
    Column("CREATED", "createdAt"),
    Column("PARTITIONID", "partitionId", wide=True),
    Column("PRODUCER", "producerSub", wide=True),
)
_FOUND = (
    Column("TX", "transactionId"),
    Column("PARTITION", "partition"),
    Column("OFFSET", "offset", right=True),
    Column("CREATED", "createdAt"),
    Column("DATA", "data"),
    Column("PARTITIONID", "partitionId", wide=True),
)


@command(
    app,
    "list",
    aliases=("ls",),
    example="""
queen messages list --queue orders --status dead_letter
queen messages list --queue orders --from '1h ago' -o wide
""",
)
def list_messages(
    ctx: typer.Context,
    queue: Annotated[
        str | None, typer.Option("--queue", help="Only of this queue.", autocompletion=complete_queues)
    ] = None,
    partition: Partition = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Only of this namespace.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only of this task.")] = None,
    status: Annotated[str | None, typer.Option("--status", help=", ".join(_STATUSES))] = None,
    cg: Annotated[str | None, typer.Option("--cg", "--group", help="The status as this group sees it.")] = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Maximum number.")] = 100,
    offset: Offset = 0,
) -> None:
    """List messages, the newest first, without their data."""
    if status is not None and status not in _STATUSES:
        raise UserError(f"--status must be one of {', '.join(_STATUSES)}, not {status!r}")
    session = Session.of(ctx)
    asked: dict[str, Any] = {
        "queue": queue,
        "partition": partition,
        "ns": namespace,
        "task": task,
        "status": status if cg is None else None,
        "from": optional_time(since) or "1970-01-01T00:00:00Z",
        "to": optional_time(until),
    }
    found = session.pages(
        lambda limit, offset: session.admin.list_messages(**asked, limit=limit, offset=offset),
        "messages",
        None if cg is not None and status is not None else offset + limit,
    )
    rows: list[dict[str, Any]] = []
    with session.out.progress("listing") as bar:
        for row in found:
            bar.advance()
            seen = row if cg is None else {**row, "status": _status_for(session, row, cg)}
            if cg is None or status in (None, seen["status"]):
                rows.append(seen)
            if len(rows) == offset + limit:
                break
    rows = rows[offset:]
    session.out.rows(rows, _LIST)


def _status_for(session: Session, row: dict[str, Any], cg: str) -> str:
    if row["status"] == "dead_letter":
        return "dead_letter"
    seen = session.admin.get_message(row["partitionId"], row["transactionId"])["consumerGroups"]
    found = next((one for one in seen if one["name"] == cg), None)
    if found is None or not found["consumed"]:
        return "processing" if found is not None and found["leaseExpiresAt"] else "pending"
    return "completed"


@command(
    app,
    "search",
    example="""
queen messages search orders --where customer.id=42 --from '1d ago'
queen messages search orders 'timeout' -n 10 -o wide
queen messages search orders --where 'total>100' --grep 'EUR|USD' -o ndjson
""",
)
def search(
    ctx: typer.Context,
    queue: QueueName,
    text: Annotated[str | None, typer.Argument(help="Text that is somewhere in the data.")] = None,
    where: Where = None,
    grep: Grep = None,
    partition: Partition = None,
    status: Annotated[str | None, typer.Option("--status", help=", ".join(_STATUSES))] = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Stop after this many.")] = 100,
) -> None:
    """Search the data of a queue's messages; nothing is consumed.

    The server reads them partition by partition, the newest first: narrow it down by time or partition where there are
    many. Exit code 4 when nothing was found.
    """
    if status is not None and status not in _STATUSES:
        raise UserError(f"--status must be one of {', '.join(_STATUSES)}, not {status!r}")
    session = Session.of(ctx)
    # Regular expressions are matched here, on what passes the rest.
    matches = message_filter(where, grep)
    asked: dict[str, Any] = {
        "partition": partition,
        "status": status,
        "text": text,
        "where": msgspec.json.encode([one for one in where or [] if not is_pattern(one)]).decode(),
        "from": optional_time(since),
        "to": optional_time(until),
        "cursor": None,
    }
    found: list[dict[str, Any]] = []
    with session.out.progress(f"searching {queue}") as bar:
        while len(found) < limit:
            page = check_answer(session.admin.search_messages(queue, **asked, limit=min(limit - len(found), 1000)))
            bar.advance(page["scanned"])
            found += [message for message in page["messages"] if matches(message)]
            asked["cursor"] = page["cursor"]
            if asked["cursor"] is None:
                break
    if not found:
        raise NothingFound
    session.out.rows(found[:limit], _FOUND)


@command(
    app, "get", aliases=("describe", "show"), example="queen messages get 51756565-0000-8000-8000-000000000002 t-1"
)
def get(ctx: typer.Context, partition_id: PartitionId, transaction_id: TransactionId) -> None:
    """Show everything about a message: data, status, and where each group is with it."""
    session = Session.of(ctx)
    session.out.value(check_answer(session.admin.get_message(partition_id, transaction_id)))


@command(app, "delete", aliases=("rm",), example="queen messages delete 51756565-0000-8000-8000-000000000002 t-1 --yes")
def delete(ctx: typer.Context, partition_id: PartitionId, transaction_id: TransactionId, yes: Yes = False) -> None:
    """Delete a message, its dead letters and its traces."""
    session = Session.of(ctx)
    session.confirm(yes, f"deleting message {transaction_id}")
    session.out.done("deleted", check_answer(session.admin.delete_message(partition_id, transaction_id)))


@command(app, "retry", example="queen messages retry 51756565-0000-8000-8000-000000000002 t-1")
def retry(ctx: typer.Context, partition_id: PartitionId, transaction_id: TransactionId) -> None:
    """Store a copy of a message at the tail of its partition; its dead letters are removed."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.retry_message(partition_id, transaction_id))
    session.out.done(f"retried {transaction_id} as {answer['newTransactionId']}", answer)


@command(app, "dlq", example="queen messages dlq 51756565-0000-8000-8000-000000000002 t-1")
def dead_letter(ctx: typer.Context, partition_id: PartitionId, transaction_id: TransactionId) -> None:
    """Make a message a dead letter."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.move_message_to_dlq(partition_id, transaction_id))
    session.out.done(f"dead-lettered {transaction_id}", answer)


@command(app, "traces", example="queen messages traces 51756565-0000-8000-8000-000000000002 t-1")
def traces(ctx: typer.Context, partition_id: PartitionId, transaction_id: TransactionId) -> None:
    """Show the traces of a message, the oldest first."""
    session = Session.of(ctx)
    answer = session.admin.get_traces_for_message(partition_id, transaction_id)
    session.out.rows(answer["traces"], MESSAGE_TRACES, answer)
