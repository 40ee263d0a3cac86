"""`queen audit`: the audit log."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlencode

import typer

from queen.cli.common.output import Column
from queen.cli.common.session import Session
from queen.cli.common.tree import command, group

app = group("Show the audit log.")

_COLUMNS: Final = (
    Column("AT", "at"),
    Column("ACTOR", "actor"),
    Column("FROM", "address"),
    Column("ACTION", "action"),
    Column("OBJECT", "object"),
    Column("STATUS", "status", right=True),
)


@command(app, "audit", example="queen audit\nqueen audit --actor alice --action DELETE")
def audit(
    ctx: typer.Context,
    actor: Annotated[str, typer.Option(help="Only what this subject did.")] = "",
    action: Annotated[str, typer.Option(help="Only actions that begin with this.")] = "",
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="Maximum number.")] = 50,
) -> None:
    """Show the audit log, the newest entries first."""
    session = Session.of(ctx)
    asked = urlencode({"actor": actor, "action": action, "limit": limit})
    page = session.queen.request("GET", f"/api/v1/audit?{asked}")
    session.out.rows(page["entries"], _COLUMNS, page)
