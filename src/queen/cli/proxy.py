"""`queen proxy`: the login page in front of a server."""

import asyncio
import dataclasses
import os
import signal
from typing import Annotated

import typer

from queen.cli.common.databases import running_database
from queen.cli.common.tree import command, group
from queen.cli.serve.logs import configure_logging

app = group("Start the proxy: a login page in front of a server.")


@command(
    app,
    "proxy",
    example="""
export PG_HOST=localhost JWT_SECRET=$(openssl rand -hex 32)
queen user add alice --role admin
queen proxy --server http://localhost:6632
""",
)
def proxy(
    port: Annotated[int | None, typer.Option(help="Port to listen on. [PORT, 3000]")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [HOST, 0.0.0.0]")] = None,
    server: Annotated[str | None, typer.Option(help="The server behind it. [QUEEN_SERVER_URL]")] = None,
) -> None:
    """Start the proxy: a login page, and a reverse proxy to the server for authenticated users.

    Give the server behind it JWT_ENABLED=true and the same JWT_SECRET.
    docs/proxy.md has all variables.
    """
    from queen.proxy.settings import ProxySettings

    settings = ProxySettings.from_env(os.environ, port=port, host=host, queen_server_url=server)
    configure_logging(settings.log_level, settings.log_encoding, "queen proxy")
    if not settings.database_url:
        settings = dataclasses.replace(settings, database_url=running_database())

    import uvloop

    from queen.proxy.app import serve

    async def run() -> None:
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        await serve(settings, stopping)

    uvloop.run(run())
