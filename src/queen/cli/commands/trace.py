"""`queen trace`: events that consumers recorded about messages."""

from __future__ import annotations

from typing import Annotated

import typer

from queen.cli.common.arguments import Group, Offset, parse_json
from queen.cli.common.output import Column
from queen.cli.common.session import Session, check_answer
from queen.cli.common.tree import command, group

app = group("Traces that consumers leave on messages.")

Limit = Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="Maximum number.")]

MESSAGE_TRACES = (
    Column("AT", "created_at"),
    Column("EVENT", "event_type"),
    Column("TRACE", lambda row: ",".join(row["trace_names"])),
    Column("DATA", "data"),
    Column("GROUP", "consumer_group", wide=True),
    Column("WORKER", "worker_id", wide=True),
)
_NAMES = (
    Column("NAME", "trace_name"),
    Column("EVENTS", "trace_count", right=True),
    Column("MESSAGES", "message_count", right=True),
    Column("LAST", "last_seen"),
)
_BY_NAME = (
    Column("AT", "created_at"),
    Column("EVENT", "event_type"),
    Column("QUEUE", "queue_name"),
    Column("PARTITION", "partition_name"),
    Column("TX", "transaction_id"),
    Column("DATA", "data"),
    Column("GROUP", "consumer_group", wide=True),
    Column("PARTITIONID", "partition_id", wide=True),
)


@command(app, "names", example="queen trace names --limit 20")
def names(ctx: typer.Context, limit: Limit = 100, offset: Offset = 0) -> None:
    """List the names of traces, the latest first."""
    session = Session.of(ctx)
    answer = session.admin.get_trace_names(limit=limit, offset=offset)
    session.out.rows(answer["trace_names"], _NAMES, answer)


@command(app, "by-name", aliases=("show",), example="queen trace by-name order-42")
def by_name(
    ctx: typer.Context, name: Annotated[str, typer.Argument(help="The name.")], limit: Limit = 100, offset: Offset = 0
) -> None:
    """Show the traces of a name in all queues, the oldest first."""
    session = Session.of(ctx)
    answer = session.admin.get_traces_by_name(name, limit=limit, offset=offset)
    session.out.rows(answer["traces"], _BY_NAME, answer)


@command(app, "by-message", example="queen trace by-message 51756565-0000-8000-8000-000000000002 t-1")
def by_message(
    ctx: typer.Context,
    partition_id: Annotated[str, typer.Argument(help="The id of its partition.")],
    transaction_id: Annotated[str, typer.Argument(help="Its transaction id.")],
) -> None:
    """Show the traces of a message, the oldest first."""
    session = Session.of(ctx)
    answer = session.admin.get_traces_for_message(partition_id, transaction_id)
    session.out.rows(answer["traces"], MESSAGE_TRACES, answer)


@command(
    app,
    "add",
    example="""queen trace add 51756565-0000-8000-8000-000000000002 t-1 --name order-42 --data '{"step": "checked"}'""",
)
def add(
    ctx: typer.Context,
    partition_id: Annotated[str, typer.Argument(help="The id of its partition.")],
    transaction_id: Annotated[str, typer.Argument(help="Its transaction id.")],
    data: Annotated[str, typer.Option("--data", help="Data of the trace, as JSON.")],
    name: Annotated[list[str] | None, typer.Option("--name", help="A name to find it by; may be repeated.")] = None,
    event: Annotated[str, typer.Option("--event", help="info, processing, step, error …")] = "info",
    cg: Group = None,
) -> None:
    """Add a trace to a message."""
    session = Session.of(ctx)
    body = {
        "partitionId": partition_id,
        "transactionId": transaction_id,
        "data": parse_json(data, "--data"),
        "eventType": event,
        "traceNames": name or None,
    }
    answer = check_answer(
        session.queen.request("POST", "/api/v1/traces", body if cg is None else {**body, "consumerGroup": cg})
    )
    session.out.done(f"traced {answer['traceId']}", answer)
