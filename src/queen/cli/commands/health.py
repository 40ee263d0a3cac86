"""`queen ping`, `version`, `status` and `lag`: health, message counts, and how far groups are behind."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from queen import __version__
from queen.cli.common.arguments import Namespace, Task, complete_queues
from queen.cli.common.exits import SERVER, ServerFailed, UserError, connection_failure
from queen.cli.common.output import Column
from queen.cli.common.session import DEFAULT_SERVER, Session
from queen.cli.common.times import age, parse_duration
from queen.cli.common.tree import command, group

ping_app = group("Check that the server and its database answer.")
version_app = group("Print the version of the command and of the server.")
status_app = group("Show the message counts and the lag of queues.")
lag_app = group("Show the lag of consumer groups.")

_PING = (
    Column("STATUS", "status"),
    Column("DATABASE", "database"),
    Column("VERSION", "version"),
    Column("LATENCY", "latency"),
    Column("SERVER", "server", wide=True),
)
_STATUS = (
    Column("QUEUE", "name"),
    Column("NAMESPACE", "namespace"),
    Column("TASK", "task", wide=True),
    Column("PENDING", "messages.pending", right=True),
    Column("PROCESSING", "messages.processing", right=True),
    Column("COMPLETED", "messages.completed", right=True),
    Column("FAILED", "messages.failed", right=True),
    Column("DLQ", "messages.deadLetter", right=True),
    Column("LAG", lambda row: age(row["lagSeconds"]), right=True),
)
_STATUS_PARTITIONS = (
    Column("PARTITION", "name"),
    Column("PENDING", "messages.pending", right=True),
    Column("PROCESSING", "messages.processing", right=True),
    Column("COMPLETED", "messages.completed", right=True),
    Column("FAILED", "messages.failed", right=True),
    Column("DLQ", "messages.deadLetter", right=True),
    Column("OLDEST", "oldestMessage"),
)
LAG_COLUMNS = (
    Column("CG", "name"),
    Column("QUEUE", "queueName"),
    Column("MESSAGES", "totalLag", right=True),
    Column("LAG", lambda row: age(row["maxTimeLag"]), right=True),
    Column("STATE", "state"),
    Column("PAUSED", lambda row: row.get("paused") or row.get("queuePaused"), wide=True),
    Column("PARTITIONS", "members", wide=True, right=True),
    Column("SUBSCRIBED", lambda row: row["subscriptionTimestamp"] or row["subscriptionMode"] or "default", wide=True),
)


@command(ping_app, "ping", example="queen ping\nqueen ping --timeout 2s --server http://localhost:6632")
def ping(
    ctx: typer.Context,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait for the answer.")] = "5s",
) -> None:
    """Check that the server and its database answer.

    Exit code 0: both do. Exit code 2: one of them does not.
    """
    session = Session.of(ctx)
    queen = session.connect(int(parse_duration(timeout) * 1000) or 1, attempts=1)
    began = time.perf_counter()
    try:
        answer = _health(session, queen)
    finally:
        queen.close()
    latency = f"{(time.perf_counter() - began) * 1000:.1f}ms"
    row = {
        "status": answer.get("status"),
        "database": answer.get("database"),
        "version": answer.get("version"),
        "latency": latency,
        "server": session.server.url,
    }
    session.out.rows([row], _PING, answer)
    if answer.get("status") != "healthy" or answer.get("database") != "connected":
        raise typer.Exit(SERVER)


@command(version_app, "version", example="queen version\nqueen version --short")
def version(
    ctx: typer.Context, short: Annotated[bool, typer.Option("--short", help="Only the command itself.")] = False
) -> None:
    """Print the version of the command and of the server."""
    session = Session.of(ctx)
    row: dict[str, Any] = {"version": __version__, "python": platform.python_version()}
    if not short:
        row |= _server_version(session)
    if session.out.given not in (None, "table", "wide"):
        session.out.value(row)
        return
    session.out.text(f"queen {row['version']} (Python {row['python']})")
    if "server" in row:
        session.out.text(f"server {row['server']} at {row['url']}")
        session.out.text(f"status {row['status']}, database {row['database']}")
        session.out.text(f"context {row['context'] or '-'}")


def _server_version(session: Session) -> dict[str, Any]:
    from queen.client.errors import QueenError

    queen = session.connect(2000, attempts=1)
    try:
        answer = queen.admin.health()
    except QueenError as error:
        session.out.note(f"server {session.server.url}: not reachable ({connection_failure(error)[0]})")
        return {}
    finally:
        queen.close()
    return {
        "server": answer["version"],
        "url": session.server.url,
        "status": answer["status"],
        "database": answer["database"],
        "context": session.server.context,
    }


@command(
    status_app,
    "status",
    example="queen status\nqueen status orders --partitions\nqueen status --namespace billing -o json",
)
def status(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only this queue.", autocompletion=complete_queues)] = None,
    namespace: Namespace = None,
    task: Task = None,
    partitions: Annotated[bool, typer.Option("--partitions", help="Show the partitions of the queue.")] = False,
) -> None:
    """Show the message counts and the lag of queues."""
    session = Session.of(ctx)
    if partitions and queue is None:
        raise UserError("--partitions needs a queue: queen status QUEUE --partitions")
    names = [queue] if queue is not None else queue_names(session, namespace, task)
    details = [session.admin.get_queue_detail(name) for name in names]
    if partitions:
        session.out.rows(details[0]["partitions"], _STATUS_PARTITIONS, details[0])
        return
    lags = lag_by_queue(session)
    rows = [
        {
            **{key: detail["queue"][key] for key in ("name", "namespace", "task")},
            "partitions": len(detail["partitions"]),
            "messages": detail["totals"]["messages"],
            "lagSeconds": lags.get(detail["queue"]["name"]),
        }
        for detail in details
    ]
    columns = (*_STATUS, Column("PARTITIONS", "partitions", wide=queue is None, right=True))
    session.out.rows(rows, columns, details[0] if queue is not None else details)


@command(lag_app, "lag", example="queen lag\nqueen lag --min-seconds 60 -o wide")
def lag(
    ctx: typer.Context,
    min_seconds: Annotated[
        int | None, typer.Option("--min-seconds", min=0, help="Only partitions behind by more than this.")
    ] = None,
) -> None:
    """Show the lag of consumer groups."""
    print_lag(Session.of(ctx), min_seconds)


def print_lag(session: Session, min_seconds: int | None, group_name: str | None = None) -> None:
    """The lag of each group on each queue; with a threshold, of each partition that is behind by more."""
    if min_seconds is None:
        rows = session.admin.list_consumer_groups() or []
        chosen = [row for row in rows if group_name in (None, row["name"])]
        session.out.rows(chosen, LAG_COLUMNS, rows)
        return
    rows = session.admin.get_lagging_consumers(min_seconds) or []
    chosen = [row for row in rows if group_name in (None, row["consumer_group"])]
    columns = (
        Column("CG", "consumer_group"),
        Column("QUEUE", "queue_name"),
        Column("PARTITION", "partition_name"),
        Column("MESSAGES", "offset_lag", right=True),
        Column("LAG", lambda row: age(row["time_lag_seconds"]), right=True),
        Column("OLDEST", "oldest_unconsumed_at", wide=True),
        Column("CONSUMED", "last_consumed_at", wide=True),
    )
    session.out.rows(chosen, columns, rows)


def queue_names(session: Session, namespace: str | None = None, task: str | None = None) -> list[str]:
    """The names of queues, in order."""
    answer = session.admin.list_queues(namespace=namespace, task=task)
    return sorted(
        queue["name"]
        for queue in answer["queues"]
        if namespace in (None, queue["namespace"]) and task in (None, queue["task"])
    )


def lag_by_queue(session: Session) -> dict[str, float]:
    """Seconds that the group furthest behind is behind, by queue."""
    lags: dict[str, float] = {}
    for row in session.admin.list_consumer_groups() or []:
        seconds = row["maxTimeLag"] or 0
        lags[row["queueName"]] = max(seconds, lags.get(row["queueName"], 0))
    return lags


def _health(session: Session, queen: Any) -> Mapping[str, Any]:
    from queen.client.errors import OverloadedError, QueenConnectionError, ServerError

    try:
        answer: Mapping[str, Any] = queen.admin.health()
    except QueenConnectionError as error:
        if session.server.configured:
            raise
        raise UserError(
            f"no server is configured, and none answers at {DEFAULT_SERVER} ({connection_failure(error)[0]}); "
            "start one (queen serve), pass --server, or set QUEEN_SERVER"
        ) from error
    except (ServerError, OverloadedError) as error:
        raise ServerFailed(f"{session.server.url} is unhealthy: {error}; run queen doctor to find the cause") from error
    return answer
