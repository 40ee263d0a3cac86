"""`queen group`: consumer groups."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from queen.cli.commands.health import LAG_COLUMNS, print_lag
from queen.cli.commands.messaging import seek_group
from queen.cli.common.arguments import DryRun, GroupName, QueueName, Yes, complete_queues
from queen.cli.common.exits import NothingFound, ServerFailed
from queen.cli.common.output import TABULAR, Column
from queen.cli.common.session import Session, check_answer
from queen.cli.common.times import age, iso, parse_time
from queen.cli.common.tree import command, group

app = group("Consumer groups: list, lag, seek, pause, resume, delete.")


_PARTITIONS = (
    Column("QUEUE", "queue"),
    Column("PARTITION", "partition"),
    Column("LAG", "offsetLag", right=True),
    Column("TIME", lambda row: age(row["timeLagSeconds"]), right=True),
    Column("CONSUMED", "totalConsumed", right=True),
    Column("LEASED", "leaseActive"),
    Column("LAST", "lastConsumedAt", wide=True),
    Column("WORKER", "workerId", wide=True),
)


@command(app, "list", aliases=("ls",), example="queen group list\nqueen group list --queue orders -o wide")
def list_groups(
    ctx: typer.Context,
    queue: Annotated[
        str | None, typer.Option("--queue", help="Only on this queue.", autocompletion=complete_queues)
    ] = None,
) -> None:
    """List consumer groups, one row for each queue they read."""
    session = Session.of(ctx)
    rows = session.admin.list_consumer_groups() or []
    session.out.rows([row for row in rows if queue in (None, row["queueName"])], LAG_COLUMNS, rows)


@command(app, "describe", aliases=("get", "show"), example="queen group describe billing")
def describe(ctx: typer.Context, name: GroupName) -> None:
    """Show where a group is, partition by partition."""
    session = Session.of(ctx)
    answer = session.admin.get_consumer_group(name) or {}
    if not answer:
        raise ServerFailed(f"no consumer group {name!r}; queen group list shows what there is")
    rows = [{"queue": queue, **one} for queue, found in sorted(answer.items()) for one in found["partitions"]]
    if session.out.given in TABULAR or (session.out.given is None and session.out.terminal):
        session.out.rows(rows, _PARTITIONS, answer)
    else:
        session.out.value(answer)


@command(app, "lag", example="queen group lag\nqueen group lag billing --min-seconds 60")
def lag(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Only this group.", metavar="GROUP")] = None,
    min_seconds: Annotated[
        int | None, typer.Option("--min-seconds", min=0, help="Only partitions behind by more than this.")
    ] = None,
) -> None:
    """Show the lag of groups."""
    print_lag(Session.of(ctx), min_seconds, name)


@command(
    app,
    "seek",
    example="""
queen group seek billing orders --to '1h ago'
queen group seek billing orders --to end --dry-run
queen group seek billing orders --offset 1200
""",
)
def seek(
    ctx: typer.Context,
    name: GroupName,
    queue: QueueName,
    to: Annotated[str | None, typer.Option("--to", help="A time, beginning, or end.")] = None,
    offset: Annotated[int | None, typer.Option("--offset", min=0, help="An offset, in every partition.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Move a group on a queue; its leases end.

    [bold]--dry-run[/bold] says how many messages would come again, and how many would be skipped.
    """
    seek_group(Session.of(ctx), name, queue, to, dry_run, "seek", offset)


@command(
    app, "release", example="queen group release billing orders p1\nqueen group release billing orders p1 --lease $ID"
)
def release(
    ctx: typer.Context,
    name: GroupName,
    queue: QueueName,
    partition: Annotated[str, typer.Argument(help="The partition.", metavar="PARTITION")],
    lease: Annotated[str | None, typer.Option("--lease", help="Only if it is this lease.")] = None,
) -> None:
    """End the lease of a group on a partition: its messages come again at once."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.release_lease(name, queue, partition, lease))
    session.out.done(f"released cg={name} partition={partition} available={answer['available']}", answer)


@command(app, "pause", example="queen group pause billing orders")
def pause(ctx: typer.Context, name: GroupName, queue: QueueName) -> None:
    """Stop delivering messages of a queue to a group; other groups go on."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.pause_consumer_group(name, queue))
    session.out.done(f"paused cg={name} queue={queue}" + ("" if answer["changed"] else ", as it was"), answer)


@command(app, "resume", example="queen group resume billing orders")
def resume(ctx: typer.Context, name: GroupName, queue: QueueName) -> None:
    """Deliver messages of a queue to a group again; its waiting pops are served at once."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.resume_consumer_group(name, queue))
    note = "" if answer["changed"] else ", which was not paused"
    session.out.done(f"resumed cg={name} queue={queue}{note}", answer)


@command(app, "subscribe", example="queen group subscribe billing --from '1d ago'")
def subscribe(
    ctx: typer.Context, name: GroupName, since: Annotated[str, typer.Option("--from", help="A time.")]
) -> None:
    """Change the time from which a group reads partitions that it has not consumed yet."""
    session = Session.of(ctx)
    answer = check_answer(session.admin.update_consumer_group_timestamp(name, iso(parse_time(since))))
    session.out.done(f"subscribed cg={name} from={answer['newTimestamp']} rows={answer['rowsUpdated']}", answer)


@command(
    app,
    "delete",
    aliases=("rm",),
    example="queen group delete billing --yes\nqueen group delete billing --queue orders --yes",
)
def delete(
    ctx: typer.Context,
    name: GroupName,
    queue: Annotated[
        str | None, typer.Option("--queue", help="Only on this queue.", autocompletion=complete_queues)
    ] = None,
    metadata: Annotated[bool, typer.Option("--metadata", help="Also delete where it started.")] = False,
    yes: Yes = False,
) -> None:
    """Delete the position of a group; its next pop starts as that of a new group."""
    session = Session.of(ctx)
    session.confirm(yes, f"forgetting where group {name} is" + (f" on {queue}" if queue else ""))
    answer: Any = (
        session.admin.delete_consumer_group(name, metadata)
        if queue is None
        else session.admin.delete_consumer_group_for_queue(name, queue, metadata)
    )
    check_answer(answer)
    session.out.done(
        f"deleted cg={name}" + (f" queue={queue}" if queue else "") + f" partitions={answer['deletedPartitions']}",
        answer,
    )
    if not answer["deletedPartitions"]:
        raise NothingFound


@command(app, "refresh-stats", example="queen group refresh-stats")
def refresh_stats(ctx: typer.Context) -> None:
    """Recompute the server's statistics now."""
    session = Session.of(ctx)
    session.out.done("refreshed", check_answer(session.admin.refresh_consumer_stats()))
