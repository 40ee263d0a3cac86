"""`queen psql`: a session on the database of the server."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Annotated

import typer

from queen.cli.common.databases import DatabaseUrl, DataDir, find_tool, open_databases, without_password
from queen.cli.common.exits import UserError
from queen.cli.common.tree import command, group

app = group("Open psql on the database of the server.")

# The oldest psql that works with all servers; an older one may lack what a newer server has.
_LEAST_VERSION = 13


@command(
    app,
    "psql",
    example="""
queen psql
queen psql --command '\\dt queen.*'
queen psql < report.sql
""",
)
def psql(
    execute: Annotated[
        list[str] | None, typer.Option("-c", "--command", help="Run this and end; may be repeated.")
    ] = None,
    shard: Annotated[int, typer.Option("--shard", min=0, help="Which of several databases.")] = 0,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Open psql on the database of the server.

    That is the one that its settings name, or the embedded one, whether the server runs or not.
    """
    tool = find_tool("psql", _LEAST_VERSION)
    with open_databases(database_url, data_dir) as databases:
        if shard >= len(databases.dsns):
            raise UserError(f"there is no shard {shard}; the settings name {len(databases.dsns)}")
        url, environment = without_password(databases.dsns[shard])
        arguments = [f"--command={text}" for text in execute or []]
        # Ctrl-C is for psql, which ends the statement and not the session.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            ended = subprocess.run(
                [tool, "--set=ON_ERROR_STOP=1", *arguments, url],
                env={**os.environ, **environment},
                check=False,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        finally:
            signal.signal(signal.SIGINT, previous)
    raise typer.Exit(ended.returncode)
