"""Arguments and options that several commands have, and reading what they name."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer

from queen.cli.common.exits import UserError

_COMPLETION_MILLIS = 2000


def complete_queues(ctx: typer.Context, incomplete: str) -> list[str]:
    """The queues of the server whose names begin so, for completion."""
    return _completions(ctx, incomplete, lambda admin: (row["name"] for row in admin.list_queues()["queues"]))


def complete_groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """The consumer groups whose names begin so, for completion."""
    return _completions(ctx, incomplete, lambda admin: (row["name"] for row in admin.list_consumer_groups() or []))


def _completions(ctx: typer.Context, incomplete: str, names: Callable[[Any], Iterable[str]]) -> list[str]:
    from queen.cli.common.session import Session

    # Completion shows nothing rather than an error.
    with contextlib.suppress(Exception), Session.of(ctx).connect(_COMPLETION_MILLIS, attempts=1) as queen:
        return sorted({name for name in names(queen.admin) if name.startswith(incomplete) and name != QUEUE_MODE})
    return []


QueueName = Annotated[str, typer.Argument(help="The queue.", metavar="QUEUE", autocompletion=complete_queues)]
GroupName = Annotated[str, typer.Argument(help="The consumer group.", metavar="GROUP", autocompletion=complete_groups)]
Group = Annotated[
    str | None,
    typer.Option(
        "--cg",
        "--group",
        help="The consumer group; without one, the queue itself.",
        autocompletion=complete_groups,
    ),
]
NeededGroup = Annotated[
    str, typer.Option("--cg", "--group", help="The consumer group.", autocompletion=complete_groups)
]
Partition = Annotated[str | None, typer.Option("--partition", help="Only this partition.")]
Namespace = Annotated[str | None, typer.Option("--namespace", help="Only of this namespace.")]
Task = Annotated[str | None, typer.Option("--task", help="Only of this task.")]
Limit = Annotated[int | None, typer.Option("-n", "--limit", min=1, help="Maximum number. [all]")]
Offset = Annotated[int, typer.Option("--offset", min=0, help="Skip this many.")]
Since = Annotated[str | None, typer.Option("--from", help="Only since this time: a date, `2h`, `5m ago` …")]
Until = Annotated[str | None, typer.Option("--to", help="Only until this time.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")]

QUEUE_MODE = "__QUEUE_MODE__"


@contextlib.contextmanager
def opened(path: Path | None) -> Iterator[TextIO]:
    """A file for reading, or stdin for none and for `-`. Bytes that are not UTF-8 are for the parser to refuse."""
    if path is None or str(path) == "-":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdin
        return
    try:
        # A file of Windows may begin with a mark of its encoding.
        file = path.open(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        yield file


def source_name(path: Path | None) -> str:
    """What errors call a file that `opened` reads."""
    return "stdin" if path is None or str(path) == "-" else str(path)


def json_lines(file: TextIO, name: str = "stdin") -> Iterator[tuple[int, Any]]:
    """The JSON values of a file, one on each line, with the numbers of their lines. Raises `UserError` at a bad one."""
    for number, line in enumerate(file, 1):
        if line.strip():
            yield number, parse_json(line, f"line {number} of {name}")


def parse_json(text: str | bytes, where: str) -> Any:
    """The JSON value of a text; `where` names it in the error."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    except UnicodeError as error:
        raise UserError(f"{where} is not JSON: it is not UTF-8") from error


def writer(path: Path | None) -> Any:
    """A file for writing, or stdout for none and for `-`; a context manager."""
    if path is None or str(path) == "-":
        return contextlib.nullcontext(sys.stdout)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
