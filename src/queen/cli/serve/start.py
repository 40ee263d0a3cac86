"""`queen serve`, without what only the command line needs: the supervisor keeps the memory that it starts with."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Final

from queen.cli.serve.logs import configure_logging
from queen.cli.serve.supervisor import Supervisor
from queen.errors import QueenError
from queen.http.auth.guard import check_security
from queen.setting_hints import environment_hints
from queen.settings import Settings, describe_settings
from queen.storage.migrate import migrate
from queen.telemetry import span_exporters

OPTIONS: Final = {
    "--port": "port",
    "--host": "host",
    "--workers": "num_workers",
    "--data-dir": "queen_data_dir",
    "--database-url": "database_urls",
    "--log-level": "log_level",
    "--log-encoding": "log_encoding",
}
"""The options of `queen serve`, and their settings."""


def plain_options(arguments: Sequence[str]) -> dict[str, str] | None:
    """Settings of arguments that are pairs of an option and its value; None: the command line has to parse them."""
    pairs = list(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) % 2 or any(option not in OPTIONS or value.startswith("-") for option, value in pairs):
        return None
    return {OPTIONS[option]: value for option, value in pairs}


def check_login(settings: Settings) -> None:
    """Raises `SettingsError` where no login could succeed in the workers."""
    # Loaded where people log in, and not by every supervisor.
    from queen.proxy.sessions import internal_key
    from queen.proxy.settings import ProxySettings

    internal_key(ProxySettings.inside(settings, ""))


def start(**options: object) -> None:
    """Run the server with these settings and those of the environment, until it is stopped."""
    settings = Settings.from_env(os.environ, **options)
    configure_logging(settings.log_level, settings.log_encoding, "queen")
    for hint in environment_hints(os.environ, [item.variable for item in describe_settings()]):
        logging.getLogger("queen").warning("%s", hint)
    span_exporters(os.environ)
    check_security(settings)
    if settings.queen_login:
        check_login(settings)
    announce = print if settings.log_encoding != "json" else logging.getLogger("queen").info
    # The supervisor waits for a database that is unavailable, and says so; one attempt of a second is enough here.
    supervisor = Supervisor(settings, partial(migrate, wait_seconds=1.0), announce)
    try:
        asyncio.run(supervisor.run())
    except QueenError as error:
        if settings.log_encoding != "json":
            raise
        logging.getLogger("queen").critical("%s", error)
        raise SystemExit(1) from error
