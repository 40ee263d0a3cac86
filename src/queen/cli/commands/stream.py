"""`queen stream`: streaming queries and the state that they keep on the server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queen.cli.common.arguments import Yes
from queen.cli.common.exits import ServerFailed
from queen.cli.common.log import positions
from queen.cli.common.output import Column
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import parse_time
from queen.cli.common.tree import command, group

app = group("Streaming queries and their state.")

_LIST = (
    Column("NAME", "name"),
    Column("SOURCE", "source_queue"),
    Column("SINK", "sink_queue"),
    Column("UPDATED", "updated_at"),
    Column("ID", "query_id", wide=True),
    Column("HASH", "config_hash", wide=True),
    Column("CREATED", "created_at", wide=True),
)
_STATE = (
    Column("KEY", "key"),
    Column("VALUE", "value"),
    Column("UPDATED", "updated_at"),
    Column("PARTITION", "partition", wide=True),
)


@command(app, "list", aliases=("ls",), example="queen stream list -o wide")
def list_streams(ctx: typer.Context) -> None:
    """List the registered queries."""
    session = Session.of(ctx)
    answer = session.admin.list_streams()
    session.out.rows(answer, _LIST, answer)


@command(
    app,
    "register",
    example="""
queen stream register hourly-totals --source orders --hash v1
queen stream register hourly-totals --source orders --sink totals --hash v2 --reset
""",
)
def register(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The name of the query.")],
    source: Annotated[str, typer.Option("--source", help="The queue that it reads.")],
    config_hash: Annotated[str, typer.Option("--hash", help="Fingerprint of its operators.")],
    sink: Annotated[str | None, typer.Option("--sink", help="The queue that it writes.")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Drop the state if the fingerprint differs.")] = False,
) -> None:
    """Register a query, or find the id of one; with another fingerprint than before it is refused, unless --reset."""
    from queen.client.errors import ConflictError

    session = Session.of(ctx)
    body = {"name": name, "source_queue": source, "sink_queue": sink, "config_hash": config_hash, "reset": reset}
    try:
        answer = check_answer(session.queen.request("POST", "/streams/v1/queries", body))
    except ConflictError as error:
        raise ServerFailed(f"{str(error).rstrip('.')}; pass its own --hash, or --reset to drop its state") from error
    kind = "registered" if answer["fresh"] else "reset" if answer["reset"] else "found"
    session.out.done(f"{kind} {name} {answer['query_id']}", answer)


@command(app, "delete", aliases=("rm",), example="queen stream delete hourly-totals --yes")
def delete(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The query.", metavar="NAME")],
    yes: Yes = False,
) -> None:
    """Delete a query and its state; its consumer group and the messages stay.

    A query that runs meanwhile is refused its next cycle, and has to be registered again.
    """
    session = Session.of(ctx)
    session.confirm(yes, f"deleting the streaming query {name} and its state")
    answer = check_answer(session.admin.delete_stream(name))
    session.out.done(f"deleted {name} rows={answer['state_rows']}", answer)


@command(
    app,
    "state",
    example="""
queen stream state hourly-totals
queen stream state hourly-totals --partition p1 --prefix window: -o wide
""",
)
def state(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The query.", metavar="NAME")],
    partition: Annotated[str | None, typer.Option("--partition", help="Only of this partition.")] = None,
    key: Annotated[list[str] | None, typer.Option("--key", help="Only this key; may be repeated.")] = None,
    prefix: Annotated[str | None, typer.Option("--prefix", help="Only keys with this prefix.")] = None,
    ripe: Annotated[str | None, typer.Option("--ripe", help="Only windows that end at this time or before.")] = None,
) -> None:
    """Show the state that a query keeps for the partitions of its source queue."""
    session = Session.of(ctx)
    query = next((one for one in session.admin.list_streams() if one["name"] == name), None)
    if query is None:
        raise ServerFailed(f"no streaming query {name!r}; queen stream list shows what there is")
    rows: list[dict[str, Any]] = []
    for place in positions(session, query["source_queue"], partition):
        body: dict[str, Any] = {"query_id": query["query_id"], "partition_id": place["partitionId"], "keys": key or []}
        if prefix is not None:
            body["key_prefix"] = prefix
        if ripe is not None:
            body["ripe_at_or_before"] = parse_time(ripe).timestamp() * 1000
        answer = check_answer(session.queen.request("POST", "/streams/v1/state/get", body))
        rows += [{**row, "partition": place["partition"]} for row in answer["rows"]]
    session.out.rows(rows, _STATE)
