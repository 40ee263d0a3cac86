"""`queen kv`, `queen lock` and `queen timer`: what consumers keep beside their messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import typer

from queen.cli.common.arguments import Offset, QueueName, complete_queues, parse_json
from queen.cli.common.exits import NothingFound, ServerFailed
from queen.cli.common.output import Column
from queen.cli.common.session import Session
from queen.cli.common.times import parse_duration
from queen.cli.common.tree import command, group
from queen.wire.paths import path_of

kv_app = group("Keys and values of namespaces.")
lock_app = group("Locks that are held.")
timer_app = group("Timers: messages that are pushed later.")

NamespaceName = Annotated[
    str, typer.Argument(help="The namespace: a queue, or a name of its own.", metavar="NAMESPACE")
]
Key = Annotated[str, typer.Argument(help="The key.", metavar="KEY")]
Prefix = Annotated[str, typer.Option("--prefix", help="Only those that begin so.")]
Limit = Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="At most so many.")]
Ttl = Annotated[str | None, typer.Option("--ttl", help="For how long, such as 10m; for good by default.")]
Expect = Annotated[
    int | None, typer.Option("--expect", min=0, help="Only if this is its version; 0: if it does not exist.")
]

_NAMESPACES: Final = (Column("NAMESPACE", "namespace"), Column("KEYS", "keys", right=True))
_KEYS: Final = (
    Column("KEY", "key"),
    Column("VALUE", "value"),
    Column("VERSION", "version", right=True),
    Column("EXPIRES", "expiresAt"),
    Column("UPDATED", "updatedAt", wide=True),
)
_LOCKS: Final = (
    Column("NAME", "name"),
    Column("OWNER", "owner"),
    Column("EXPIRES", "expiresAt"),
    Column("SINCE", "since", wide=True),
)
_TIMERS: Final = (
    Column("KEY", "timerKey"),
    Column("QUEUE", "queue"),
    Column("DELIVER-AT", "deliverAt"),
    Column("PARTITION", "partition", wide=True),
)


@command(
    kv_app,
    "list",
    aliases=("ls",),
    example="queen kv list\nqueen kv list orders --prefix order- -n 50",
)
def list_keys(
    ctx: typer.Context,
    namespace: Annotated[str | None, typer.Argument(help="The namespace; without one, namespaces are listed.")] = None,
    prefix: Prefix = "",
    limit: Limit = 100,
    offset: Offset = 0,
) -> None:
    """List the keys of a namespace, or the namespaces that have keys."""
    session = Session.of(ctx)
    page = {"limit": limit, "offset": offset}
    if namespace is None:
        answer = _get(session, "/api/v1/kv", {**page, "search": prefix})
        session.out.rows(answer["namespaces"], _NAMESPACES, answer)
        return
    answer = _get(session, path_of("/api/v1/kv", namespace), {**page, "prefix": prefix})
    session.out.rows(answer["keys"], _KEYS, answer)


@command(kv_app, "get", example="queen kv get orders order-7\nqueen kv get orders order-7 -o yaml")
def get_key(ctx: typer.Context, namespace: NamespaceName, key: Key) -> None:
    """Print the value of a key as JSON; with an output format, also its version and expiry.

    Exit code 4 when there is none.
    """
    session = Session.of(ctx)
    entry = session.queen.kv(namespace).entry(key)
    if not entry["found"]:
        raise NothingFound
    if session.out.given is None:
        session.out.line(entry["value"])
    else:
        session.out.value(entry)


@command(
    kv_app,
    "put",
    aliases=("set",),
    example="""
queen kv put orders order-7 '{"state": "held"}' --ttl 10m
queen kv put orders leader '"host-1"' --expect 0
""",
)
def put_key(
    ctx: typer.Context,
    namespace: NamespaceName,
    key: Key,
    value: Annotated[str, typer.Argument(help="The value, as JSON.")],
    ttl: Ttl = None,
    expect: Expect = None,
) -> None:
    """Write a key."""
    session = Session.of(ctx)
    answer = session.queen.kv(namespace).put(key, parse_json(value, "the value"), ttl=_seconds(ttl), expect=expect)
    if not answer["applied"]:
        raise ServerFailed(f"key {key} was not written: its version is {answer['version']}, not {expect}")
    session.out.done(f"put {namespace} {key} version={answer['version']}", answer)


@command(kv_app, "incr", example="queen kv incr orders held\nqueen kv incr orders held --by -1 --ttl 1h")
def increment_key(
    ctx: typer.Context,
    namespace: NamespaceName,
    key: Key,
    by: Annotated[int, typer.Option("--by", help="What to add.")] = 1,
    ttl: Ttl = None,
) -> None:
    """Increment a number, which starts at 0, and print the result."""
    session = Session.of(ctx)
    session.out.line(session.queen.kv(namespace).incr(key, by, ttl=_seconds(ttl)))


@command(kv_app, "delete", aliases=("rm",), example="queen kv delete orders order-7")
def delete_key(ctx: typer.Context, namespace: NamespaceName, key: Key, expect: Expect = None) -> None:
    """Delete a key. Exit code 4 when it was not there, or has another version."""
    session = Session.of(ctx)
    if not session.queen.kv(namespace).delete(key, expect=expect):
        raise NothingFound
    session.out.done(f"deleted {namespace} {key}")


@command(lock_app, "list", aliases=("ls",), example="queen lock list\nqueen lock list --prefix report- -o wide")
def list_locks(ctx: typer.Context, prefix: Prefix = "", limit: Limit = 100, offset: Offset = 0) -> None:
    """List the locks that are held, with their holders."""
    session = Session.of(ctx)
    answer = _get(session, "/api/v1/locks", {"prefix": prefix, "limit": limit, "offset": offset})
    session.out.rows(answer["locks"], _LOCKS, answer)


@lock_app.callback()
def _lock() -> None:
    """Locks that are held."""


@command(
    timer_app, "list", aliases=("ls",), example="queen timer list\nqueen timer list --queue orders --prefix order-"
)
def list_timers(
    ctx: typer.Context,
    queue: Annotated[
        str | None, typer.Option("--queue", help="Only of this queue.", autocompletion=complete_queues)
    ] = None,
    prefix: Prefix = "",
    limit: Limit = 100,
    offset: Offset = 0,
) -> None:
    """List the timers that are pending, the next to be due first."""
    session = Session.of(ctx)
    asked = {"queue": queue or "", "prefix": prefix, "limit": limit, "offset": offset}
    answer = _get(session, "/api/v1/timers", asked)
    session.out.rows(answer["timers"], _TIMERS, answer)


@command(
    timer_app, "schedule", aliases=("set",), example="""queen timer schedule orders order-7 '{"order": 7}' --in 15m"""
)
def schedule_timer(
    ctx: typer.Context,
    queue: QueueName,
    key: Key,
    value: Annotated[str, typer.Argument(help="The message, as JSON.")],
    after: Annotated[str, typer.Option("--in", help="How long from now, such as 15m.")],
    partition: Annotated[str | None, typer.Option("--partition", help="The partition it is pushed to.")] = None,
) -> None:
    """Schedule a message; it replaces what was scheduled under the same key."""
    session = Session.of(ctx)
    timers = session.queen.timers(queue)
    answer = timers.schedule(key, parse_json(value, "the message"), seconds=parse_duration(after), partition=partition)
    session.out.done(f"scheduled {queue} {key} in {after}", answer)


@command(timer_app, "cancel", aliases=("delete", "rm"), example="queen timer cancel orders order-7")
def cancel_timer(ctx: typer.Context, queue: QueueName, key: Key) -> None:
    """Cancel a timer: its message is not pushed. Exit code 4 when no such timer is pending: it may have fired."""
    session = Session.of(ctx)
    if not session.queen.timers(queue).cancel(key):
        raise NothingFound
    session.out.done(f"cancelled {queue} {key}")


def _get(session: Session, path: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in parameters.items() if value not in (None, "")}
    answer: dict[str, Any] = session.queen.request("GET", f"{path}?{urlencode(given)}")
    return answer


def _seconds(ttl: str | None) -> int | None:
    return None if ttl is None else max(1, round(parse_duration(ttl)))
