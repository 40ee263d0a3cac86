"""What all commands of `queen pipeline` are told in the same way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from queen.errors import QueenError
from queen.pipelines.connection import Connection
from queen.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where pipelines keep their state. [QUEEN_DATA_DIR]")]
Server = Annotated[str | None, typer.Option(help="URL of the server. [QUEEN_SERVER, http://localhost:6632]")]
Token = Annotated[str | None, typer.Option(help="Bearer token for the server. [QUEEN_TOKEN]")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="PostgreSQL behind the server, one URL for each shard, separated by commas; Spark reads it directly."
        " [DATABASE_URLS, PG_HOST, ..., the embedded one]"
    ),
]
Master = Annotated[str, typer.Option(help="The Spark to run on: local[*], spark://host:7077, yarn, k8s://...")]
Conf = Annotated[list[str] | None, typer.Option(help="A setting of Spark, key=value; may be repeated.")]
LOCAL = "local[*]"


def data_dir(given: Path | None) -> Path:
    return Settings.from_env(os.environ, queen_data_dir=given).queen_data_dir


def connect(server: str | None, token: str | None, database_url: str | None, directory: Path | None) -> Connection:
    """Where the queues are, as the options say, else the environment, else the server of this machine."""
    settings = Settings.from_env(os.environ, queen_data_dir=directory, database_urls=database_url)
    return Connection(
        server=server or os.environ.get("QUEEN_SERVER") or f"http://localhost:{settings.port}",
        token=token or os.environ.get("QUEEN_TOKEN"),
        databases=settings.database_dsns or _embedded(settings.queen_data_dir),
    )


def session(name: str, master: str, conf: list[str] | None) -> SparkSession:
    """Raises `SparkMissing`."""
    from queen.pipelines.session import open_session

    settings = {}
    for item in conf or ():
        key, equals, value = item.partition("=")
        if not equals or not key.startswith("spark."):
            raise QueenError(f"--conf {item}: expected a setting of Spark such as spark.driver.memory=2g")
        settings[key] = value
    return open_session(name, master, settings)


def _embedded(directory: Path) -> tuple[str, ...]:
    """The embedded PostgreSQL of a server that runs here."""
    from queen.postgres.postmaster import find_postmaster

    postmaster = find_postmaster(directory / "postgres" / "cluster")
    return (postmaster.dsn("postgres"),) if postmaster is not None else ()
