"""Runs pipelines that tests write down as text."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from queen.cli import app as cli
from queen.pipelines.declaration import ONCE, Declaration
from queen.pipelines.loading import load
from queen.pipelines.run import Run, RunOptions
from queen.pipelines.session import Connection
from queen.pipelines.state import StateDirectory
from queen.wire.pipelines import PipelineStatus


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """A command of `queen` in this process, which starts no interpreter for it: exit code, output, errors."""
    before, sys.argv = sys.argv, ["queen", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.run()
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


class Runner:
    """Everything of a test is under its directory: `in/` for files to read, what sinks write beside it."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.directory = directory
        self.state = StateDirectory(directory / "data")
        self._batches = 0

    def batch(self, *records: Any, folder: str = "in") -> None:
        """A file of records (text as it is), which a source that takes one file per batch reads as its next batch."""
        path = self.directory / folder / f"{self._batches:04d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records))
        # Files are read in the order of their times, which are too coarse for files written in a row.
        os.utime(path, (1_700_000_000 + self._batches,) * 2)
        self._batches += 1

    def file(self, text: str, name: str = "pipeline.yaml") -> Path:
        """`DIR` in the text is the test's directory."""
        path = self.directory / name
        path.write_text(textwrap.dedent(text).replace("DIR", str(self.directory)))
        return path

    async def run(
        self, file: Path | Declaration, connection: Connection | None = None, **options: Any
    ) -> PipelineStatus:
        """Once over what is there. In a thread, so that the test's server goes on working."""
        _, ended = self.begin(file, connection, **({"trigger": ONCE} | options))
        return await ended

    def begin(
        self, file: Path | Declaration, connection: Connection | None = None, **options: Any
    ) -> tuple[Run, asyncio.Future[PipelineStatus]]:
        """A run that goes on, and what will become of it."""
        declaration = load(file) if isinstance(file, Path) else file
        run_options = RunOptions(Path("test"), "local[2]", **options)
        run = Run(declaration, connection or Connection("http://localhost:1"), self.state, run_options)
        return run, asyncio.ensure_future(asyncio.to_thread(run.run, self.session))

    def session(self) -> SparkSession:
        """The shared session, as that of this thread."""
        # To make a frame makes the session this thread's own, without which a write does not find the format.
        self.spark.createDataFrame([(0,)], "n int")
        return self.spark

    def rows(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        """What a Parquet sink holds now, sorted."""
        path = self.directory / name
        if not any(path.rglob("*.parquet")):
            return []
        rows: Sequence[Row] = self.spark.read.parquet(str(path)).select(*columns).collect()
        return sorted((tuple(row) for row in rows), key=repr)
