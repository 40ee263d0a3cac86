"""`queen serve` and `queen settings`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from queen.cli.common.output import FORMATS, Column, Output
from queen.cli.common.tree import command, group

if TYPE_CHECKING:
    from rich.table import Table

    from queen.settings import Settings

serve_app = group("Start the server, by default on an embedded PostgreSQL.")
settings_app = group("Show every setting with its meaning and its current value.")

_COLUMNS = (
    Column("VARIABLE", "variable"),
    Column("VALUE", "value"),
    Column("DEFAULT", "default", wide=True),
    Column("UNIT", "unit"),
    Column("MEANING", "meaning"),
)
_HEAD = """\
# Settings

Every setting is an environment variable. `queen serve` also takes the most used ones as options, and an
option wins over its variable. `queen settings` shows what is in force.

- The variable `X` may also be given as `X_FILE`, the path of a file that holds the value; use it for secrets.
- An empty variable counts as unset. It makes a true-or-false setting false.
- A value that cannot be used stops the start, with a message that names the variable and what was expected.
- Without `PG_HOST` and `DATABASE_URLS`, Queen runs on an embedded PostgreSQL below `QUEEN_DATA_DIR`.

| Variable | Value | Default | Unit | Meaning |
|---|---|---|---|---|
"""

_FOOT = "\nThis page is made from the declarations in `src/queen/settings.py` by `make docs`.\n"


def settings_page() -> str:
    """The text of docs/settings.md."""
    from queen.settings import describe_settings

    rows = (
        f"| `{item.variable}` | {item.kind.name} | {item.default_text} | {item.unit} | {item.meaning} |\n"
        for item in describe_settings()
    )
    return _HEAD + "".join(rows) + _FOOT


def settings_rows(settings: Settings) -> list[dict[str, str]]:
    """Every setting with the value it has now; secrets are not shown."""
    from queen.settings import describe_settings

    return [
        {
            "variable": item.variable,
            "value": item.show(settings),
            "default": item.default_text,
            "unit": item.unit,
            "meaning": item.meaning.replace("`", ""),
        }
        for item in describe_settings()
    ]


def _folded(rows: Iterable[Mapping[str, str]]) -> Table:
    """For a terminal: the meanings are longer than a line."""
    from rich.table import Table
    from rich.text import Text

    shown = ("variable", "value", "unit", "meaning")
    table = Table(*shown, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in shown))
    return table


@command(
    serve_app,
    "serve",
    example="""
queen serve
queen serve --database-url postgresql://user:password@host/database
PG_HOST=host PG_USER=user PG_PASSWORD_FILE=/run/secrets/pg queen serve
""",
)
def serve(
    port: Annotated[int | None, typer.Option(help="Port of the HTTP server. [PORT, 6632]")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. [HOST, 127.0.0.1; all with authentication]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes. [NUM_WORKERS, the usable cores, at most 8]")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the embedded PostgreSQL keeps its data. [QUEEN_DATA_DIR]")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(help="Your PostgreSQL, instead of the embedded one. [DATABASE_URLS, PG_HOST, ...]"),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="trace, debug, info, warn or error. [LOG_LEVEL, info]")] = None,
    log_encoding: Annotated[str | None, typer.Option(help="text or json. [LOG_ENCODING, text]")] = None,
) -> None:
    """Start the server, by default on an embedded PostgreSQL.

    Each option stands for an environment variable, named behind it with its
    default; the option wins. All other settings are variables only:
    [bold]queen settings[/bold] lists them.

    Data stay in the data directory until you delete it. Ctrl-C finishes the
    requests in progress, then stops the workers and the embedded PostgreSQL;
    a second Ctrl-C does not wait.
    """
    from queen.cli.serve.start import start

    start(
        port=port,
        host=host,
        num_workers=workers,
        queen_data_dir=data_dir,
        database_urls=database_url,
        log_level=log_level,
        log_encoding=log_encoding,
    )


@command(
    settings_app, "settings", example="queen settings\nPOP_SAFETY_POLL_MS=500 queen settings\nqueen settings -o csv"
)
def settings(
    output: Annotated[str | None, typer.Option("-o", "--output", help=" | ".join(FORMATS))] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/settings.md instead.")] = False,
) -> None:
    """Show every setting with its meaning and its current value."""
    if markdown:
        print(settings_page(), end="")
        return
    import rich.console

    from queen.settings import Settings

    out = Output(output)
    rows = settings_rows(Settings.from_env(os.environ))
    if out.given is None and out.terminal:
        rich.console.Console().print(_folded(rows))
    else:
        out.rows(rows, _COLUMNS)
