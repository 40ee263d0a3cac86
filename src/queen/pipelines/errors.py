"""What can be wrong with a pipeline before and while it runs.

PipelineError
├── DeclarationError     the file that declares the pipeline is wrong; every problem, with its place
├── SparkMissing         Java or PySpark is not installed
├── AlreadyRunning       a pipeline of this name runs already
└── ArchiveError         an archive cannot be used as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from queen.errors import QueenError


class PipelineError(QueenError):
    """A pipeline cannot do what it was asked to."""


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


class AlreadyRunning(PipelineError):
    """A pipeline of this name runs already."""


class ArchiveError(PipelineError):
    """An archive cannot be used as it is."""
