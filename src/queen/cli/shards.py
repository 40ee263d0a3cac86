"""`queen shards`: what is on each shard, and moving it to another."""

import asyncio
import os
from collections.abc import Sequence
from typing import Annotated

import rich.console
import rich.progress
import typer

from queen.broker.sharding.fleet import Fleet, connect_fleet, names_on, view_shards
from queen.broker.sharding.layout import change_layout, move_namespace, namespace_homes
from queen.broker.sharding.move import Mover
from queen.cli.common.exits import UserError
from queen.cli.common.output import FORMATS, Column, Output
from queen.cli.common.tree import command, group
from queen.cli.serve.database import describe_dsn
from queen.errors import BadRequest, Conflict, DatabaseUnavailable, QueenError
from queen.settings import Settings
from queen.storage.migrate import migrate
from queen.storage.shard_setup import set_up_shards
from queen.wire.shards import Name, home

app = group("Shards: the PostgreSQL instances that DATABASE_URLS names, and what lives on them.")

_COLUMNS = (
    Column("SHARD", "shard", right=True),
    Column("DATABASE", "database"),
    Column("STATE", "state"),
    Column("QUEUES", "queues", right=True),
    Column("TOPICS", "topics", right=True),
    Column("BYTES", "bytes", right=True),
)


@command(app, "list", example="queen shards list\nqueen shards list -o json")
def list_shards(
    output: Annotated[str | None, typer.Option("-o", "--output", help=" | ".join(FORMATS))] = None,
) -> None:
    """List the shards, with what each of them holds."""
    out = Output(output)
    dsns = _dsns()

    async def show() -> None:
        async with connect_fleet(dsns) as fleet:
            views = await view_shards(fleet)
        rows = []
        for view, dsn in zip(views, dsns, strict=True):
            known = view.state != "unavailable"
            rows.append(
                {
                    "shard": view.number,
                    "database": describe_dsn(dsn),
                    "state": view.state,
                    "queues": view.queues if known else None,
                    "topics": view.topics if known else None,
                    "bytes": view.bytes if known else None,
                    "unfinished": list(view.unfinished),
                }
            )
        out.rows(rows, _COLUMNS)
        for view in views:
            for what in view.unfinished:
                out.note(f"an unfinished move of {what} on shard {view.number}: move it again to finish it")

    asyncio.run(show())


@command(
    app,
    "add",
    example="queen shards add postgresql://queen@db2/queen\nqueen shards add postgresql://queen@db2/queen --open",
)
def add(
    database_url: Annotated[str, typer.Argument(help="The database of the new shard, as a URL.")],
    open_: Annotated[bool, typer.Option("--open", help="Create new queues and topics on it.")] = False,
) -> None:
    """Add a database as a shard: check it, migrate it, and give it its number.

    Add its URL to DATABASE_URLS of every server, restart them, and then run this once more with --open. Nothing that
    exists is moved. The same brings a shard back that was drained.
    """
    dsns = list(_dsns())
    if database_url not in dsns:
        if open_:
            raise UserError(
                "DATABASE_URLS does not name it yet: servers that do not know a shard cannot create what belongs "
                "there. Add it at the end of DATABASE_URLS everywhere, restart the servers, and run this again"
            )
        dsns.append(database_url)
    number = dsns.index(database_url)

    async def join() -> None:
        for dsn in dsns:
            try:
                await migrate(dsn, wait_seconds=1.0)
            except DatabaseUnavailable as error:
                raise DatabaseUnavailable(f"{describe_dsn(dsn)}: {error}") from error
        await set_up_shards(dsns)
        async with connect_fleet(dsns) as fleet:
            layout = await fleet.layout()
            if open_:
                await change_layout(fleet, sorted({*layout, number}))
                print(f"shard {number} ({describe_dsn(database_url)}) takes new queues and topics now")
            elif number in layout:
                print(f"shard {number} ({describe_dsn(database_url)}) takes new queues and topics")
            else:
                print(
                    f"{describe_dsn(database_url)} is shard {number}. Next: add it to DATABASE_URLS of every server"
                    " (at the end), restart them, and run this again with --open"
                )

    asyncio.run(join())


@command(app, "move", example="queen shards move orders --to 1\nqueen shards move payments/refunds --to 0")
def move(
    name: Annotated[str, typer.Argument(help="A queue, or a topic as namespace/topic.")],
    to: Annotated[int, typer.Option(help="The number of the shard it goes to.")],
    topic: Annotated[bool, typer.Option("--topic", help="NAME is a topic, also if a queue has that name.")] = False,
) -> None:
    """Move a queue or a topic to another shard while it is used.

    Should this be interrupted, whatever by, it has moved or it has not; run it again to finish.
    """
    dsns = _dsns()

    async def run() -> None:
        async with connect_fleet(dsns) as fleet:
            what = await _find(fleet, name, topic)
            moved = await _move(fleet, [(what, to)])
        print(f"{what} is on shard {to}" + ("" if moved else " already"))

    asyncio.run(run())


@command(app, "drain", example="queen shards drain 2")
def drain(number: Annotated[int, typer.Argument(help="The number of the shard to empty.")]) -> None:
    """Move everything off a shard; new queues and topics are created on the others.

    What a name's hash says decides where it goes. Run it again if it was interrupted.
    """
    dsns = _dsns()

    async def run() -> None:
        async with connect_fleet(dsns) as fleet:
            layout = [shard for shard in await fleet.layout() if shard != number]
            if not layout:
                raise Conflict(f"shard {number} is the only one that takes new names: open another one first")
            await change_layout(fleet, layout)
            names = await names_on(fleet, number)
            await _move(fleet, [(name, home(name, layout)) for name in names])
            for name, shard in (await namespace_homes(fleet, layout)).items():
                if shard == number:
                    await move_namespace(fleet, name, number, home(name, layout))
        print(f"shard {number} is empty: {len(names)} queues and topics have left it")

    asyncio.run(run())


async def _find(fleet: Fleet, text: str, topic: bool) -> Name:
    namespace, slash, rest = text.partition("/")
    as_topic = Name.topic(namespace, rest) if slash and rest else None
    if topic:
        if as_topic is None:
            raise BadRequest(f"{text!r} is not a topic: name it as namespace/topic")
        return as_topic
    queue = Name.queue(text)
    if as_topic is None:
        return queue
    try:
        await fleet.holder(queue)
    except QueenError:
        return as_topic
    return queue


async def _move(fleet: Fleet, moves: Sequence[tuple[Name, int]]) -> int:
    """Move one after the other, and show how far it is; returns how many were not there already."""
    moved = 0
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        for name, to in moves:
            task = bar.add_task(f"{name}: looking", total=1)

            def show(phase: str, done: int, total: int, name: Name = name, task: rich.progress.TaskID = task) -> None:
                bar.update(task, description=f"{name}: {phase}", completed=done, total=max(1, total))

            moved += await Mover(fleet, show).move(name, to)
            bar.update(task, description=f"{name}: on shard {to}", completed=1, total=1)
    return moved


def _dsns() -> tuple[str, ...]:
    dsns = Settings.from_env(os.environ).database_dsns
    if not dsns:
        raise QueenError("shards need databases of their own: set DATABASE_URLS as it is set for the server")
    return dsns
