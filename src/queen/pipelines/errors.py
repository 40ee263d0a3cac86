"""Errors of pipelines, and the cause within an error of Spark.

PipelineError
├── DeclarationError     the file that declares the pipeline is wrong; every problem, with its place
├── SparkMissing         Java or PySpark is not installed
├── TablesMissing        the packages of Delta Lake, Iceberg or an object store are not installed
├── AlreadyRunning       a pipeline of this name runs already
├── ArchiveError         an archive cannot be used as it is
└── SchemaChange         the columns of rows do not fit those of the table
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from queen.errors import QueenError


class PipelineError(QueenError):
    """A pipeline cannot be run as requested."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the file that declares a pipeline."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in a declaration."""

    where: Where
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class DeclarationError(PipelineError):
    """The file that declares the pipeline is wrong."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("the pipeline cannot be used:\n" + "\n".join(f"  {problem}" for problem in problems))


class SparkMissing(PipelineError):
    """Java or PySpark is not installed."""


class TablesMissing(PipelineError):
    """The packages of Delta Lake, Iceberg or an object store are not installed."""


class AlreadyRunning(PipelineError):
    """A pipeline of this name runs already."""


class ArchiveError(PipelineError):
    """An archive cannot be used as it is."""


class SchemaChange(PipelineError):
    """The columns of rows do not fit those of the table."""


_LONGEST_CAUSE: Final = 1000
# The last line of a Python traceback; errors of Queen say all that matters, so their class is left out.
_OURS: Final = re.compile(r"^(?:pyspark\.\S+: )?queen\.[\w.]+\.[A-Z]\w*: (?P<text>.+)")
_PYTHON: Final = re.compile(r"^(?P<text>(?:(?:[a-z_]\w*\.)+[A-Z]\w*|[A-Z]\w*(?:Error|Exception)): \S.*)")
_JAVA: Final = re.compile(r"^(?:Caused by: |: )?(?P<text>(?:[a-z]\w*\.)+[A-Z][\w$]*(?:Error|Exception): \S.*)")
# Errors that do not name a cause.
_WRAPPERS: Final = ("PythonException", "awaitResult", "Job aborted", "SparkException: Task failed", "Py4JJavaError")
_PLAN: Final = re.compile(r"\n+(=== Streaming Query ===|== SQL|JVM stacktrace:|Driver stacktrace:)")
_CODE: Final = re.compile(r"^(?:(?:pyspark\.errors|org\.apache\.spark)\.[\w.]+: )?\[([A-Z_]+(?:\.[A-Z_]+)*)\] ")
_STATE: Final = re.compile(r"\s*\bSQLSTATE: \w{5}\b")


def cause_of(error: BaseException | str) -> str:
    """The line of a Spark error that names the cause."""
    texts = [_PLAN.split(one)[0] for one in ([error] if isinstance(error, str) else _texts(error))]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    for pattern in (_OURS, _PYTHON, _JAVA):
        found = [match["text"] for line in lines if (match := pattern.match(line))]
        found = [one for one in found if not any(wrapper in one for wrapper in _WRAPPERS)]
        if found:
            return _plain(found[-1])
    # Its own text; its causes repeat it at greater length.
    first = next((text for text in texts if text.strip()), "").partition(";\n")[0]
    return _plain(" ".join(first.split())) or "Spark does not say why"


def _plain(text: str) -> str:
    """The text without Spark's error codes."""
    return _STATE.sub("", _CODE.sub("", text)).rstrip("; ")[:_LONGEST_CAUSE]


def _texts(error: BaseException) -> Iterator[str]:
    """The texts of an error and its causes, in Python and in the JVM, the outermost first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield str(one)
        java = getattr(one, "java_exception", None) or getattr(one, "_origin", None)
        for _ in range(20):
            if java is None:
                break
            yield str(java.toString())
            java = java.getCause()
        cause = getattr(one, "cause", None) or getattr(one, "_cause", None)
        one = cause if isinstance(cause, BaseException) else one.__cause__


@contextmanager
def spark_failures() -> Iterator[None]:
    """Raises `PipelineError` with the cause for what fails in Spark, Arrow, PostgreSQL or a directory."""
    import psycopg
    import pyarrow
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError, pyarrow.ArrowException, psycopg.Error) as error:
        raise PipelineError(cause_of(error)) from error
    except OSError as error:
        # Without a file it is a connection.
        if error.filename is None:
            raise
        raise PipelineError(
            f"{error.filename}: {error.strerror}. Check the path, who may write to it, and the space on its disk"
        ) from error
