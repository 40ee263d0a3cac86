"""Output of commands: rows as a table, JSON, YAML, CSV or text, on stdout; everything else on stderr."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

import msgspec

from queen.cli.common.exits import UserError
from queen.cli.common.printable import json_text, on_one_line, printable

FORMATS: Final = ("table", "wide", "json", "ndjson", "jsonl", "yaml", "csv", "name", "raw", "jsonpath=<expr>")
TABULAR: Final = ("table", "wide", "csv", "name")
"""Those that show columns."""

_NOTHING: Final = "-"
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN, _PLAIN = (
    "\033[1m",
    "\033[2m",
    "\033[31m",
    "\033[32m",
    "\033[33m",
    "\033[36m",
    "\033[0m",
)
STYLES: Final = {"bold": _BOLD, "dim": _DIM, "red": _RED, "green": _GREEN, "yellow": _YELLOW, "cyan": _CYAN}
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(-?\d+|\*)\]")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, and where its value is in a row (a path, or a function of the row)."""

    heading: str
    value: str | Callable[[Mapping[str, Any]], Any]
    wide: bool = False
    right: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        return cell(self.read(row))

    def read(self, row: Mapping[str, Any]) -> Any:
        return self.value(row) if callable(self.value) else lookup(row, self.value)


class Output:
    """Prints in one format. Without one: a table (or YAML) on a terminal, JSON elsewhere."""

    def __init__(
        self,
        format_: str | None = None,
        *,
        headers: bool = True,
        quiet: bool = False,
        color: bool | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self.given = format_
        self.terminal = self._out.isatty()
        self._headers = headers
        self.quiet = quiet
        self.color = self._colored(self._out) if color is None else color
        self._path: str | None = None
        if format_ is not None and format_.startswith("jsonpath="):
            self._path = format_.partition("=")[2]
        elif format_ is not None and format_ not in FORMATS:
            raise UserError(f"no output format {format_!r}; there is {', '.join(FORMATS)}")

    def rows(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], answer: Any = None) -> None:
        """A list of things. `answer` is the response of the server, for `raw` and `jsonpath`."""
        kind = self.given or ("table" if self.terminal else "json")
        if kind in ("table", "wide"):
            self.table([column for column in columns if kind == "wide" or not column.wide], rows)
        elif kind == "csv":
            self._csv(columns, rows)
        elif kind == "name":
            # The first column is what other commands take.
            for row in rows:
                self.text(self._shown(columns[0].text(row)))
        elif kind in ("ndjson", "jsonl"):
            for row in rows:
                self.line(row)
        elif kind == "raw" or self._path is not None:
            self._document("raw" if kind == "raw" else kind, rows if answer is None else answer)
        else:
            self._document(kind, rows)

    def value(self, answer: Any) -> None:
        """One thing without columns."""
        kind = self.given or ("yaml" if self.terminal else "json")
        self._document("yaml" if kind in TABULAR else kind, answer)

    def done(self, text: str, answer: Any = None) -> None:
        """The result of an action: a line of text, or the whole response with an output format."""
        if self.given is not None and self.given not in TABULAR:
            self._document(self.given, {"message": text} if answer is None else answer)
        elif not self.quiet:
            print(printable(text), file=self._out)

    def line(self, value: Any) -> None:
        """One JSON value on a line of its own, out at once."""
        self._out.write(json_text(value) + "\n")
        self._out.flush()

    def text(self, text: str) -> None:
        print(text, file=self._out)

    def note(self, text: str) -> None:
        """For the person at the terminal: not data, so on stderr, and not with --quiet."""
        if not self.quiet:
            print(printable(text), file=self._err)

    def styled(self, text: str, *styles: str) -> str:
        """The text in colours where there are colours."""
        if not self.color or not styles:
            return text
        return "".join(STYLES[style] for style in styles) + text + _PLAIN

    def progress(self, description: str, total: float | None = None, *, beside_lines: bool = False) -> Progress:
        """A progress bar on stderr, if that is a terminal; see `Progress`.

        `beside_lines`: the work prints lines meanwhile, which on a terminal would be drawn into the bar, and show
        themselves how far it is.
        """
        hidden = beside_lines and self.terminal
        return Progress(description, total, show=self._err.isatty() and not self.quiet and not hidden)

    def table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        from rich.cells import cell_len

        cells = [[on_one_line(column.text(row)) for column in columns] for row in rows]
        headings = [column.heading for column in columns]
        shown = [headings, *cells] if self._headers else cells
        widths = [max((cell_len(line[index]) for line in shown), default=0) for index in range(len(columns))]
        for number, line in enumerate(shown):
            padded = [
                " " * (width - cell_len(text)) + text if column.right else text + " " * (width - cell_len(text))
                for text, width, column in zip(line, widths, columns, strict=True)
            ]
            text = "  ".join(padded).rstrip()
            print(self.styled(text, "bold") if number == 0 and self._headers else text, file=self._out)

    def _csv(self, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
        writer = csv.writer(self._out, lineterminator="\n")
        if self._headers:
            writer.writerow([column.heading.lower() for column in columns])
        for row in rows:
            values = [column.read(row) for column in columns]
            writer.writerow(["" if value in (None, "") else self._shown(cell(value)) for value in values])

    def _document(self, kind: str, value: Any) -> None:
        if self._path is not None:
            for found in _select(value, self._path):
                print(self._shown(found) if isinstance(found, str) else json_text(found), file=self._out)
        elif kind == "yaml":
            import yaml

            print(yaml.safe_dump(plain(value), sort_keys=False, allow_unicode=True).rstrip(), file=self._out)
        elif kind in ("ndjson", "jsonl"):
            for one in value if isinstance(value, list) else [value]:
                self.line(one)
        elif kind == "raw":
            print(self._shown(value) if isinstance(value, str) else json_text(value), file=self._out)
        else:
            print(json_text(value, indent=2), file=self._out)

    def _shown(self, text: str) -> str:
        """Data as they are; on a terminal, so that they do nothing there."""
        return printable(text) if self.terminal else text

    @staticmethod
    def _colored(stream: TextIO) -> bool:
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """A bar for work that takes longer than a second; does nothing where stderr is no terminal.

    with out.progress("pushing", total=1000) as bar:
        bar.advance(100)
    """

    def __init__(self, description: str, total: float | None, *, show: bool) -> None:
        self._description = description
        self._total = total
        self._show = show
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._description, total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: float = 1) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, count)

    def update(self, *, completed: float | None = None, total: float | None = None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, total=total)


def lookup(value: Any, path: str) -> Any:
    """What is at a path such as `messages.pending`; None where something on the way is absent."""
    for step in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(step)
    return value


def cell(value: Any) -> str:
    """A value as it stands in a table."""
    if value is None or value == "":
        return _NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, str | int):
        return str(value)
    return json_text(value)


def plain(value: Any) -> Any:
    """The value as dicts, lists, text and numbers alone, for YAML."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _select(value: Any, path: str) -> list[Any]:
    """What a path such as `.queues[0].name` or `{.queues[*].name}` finds."""
    expression = path.strip().removeprefix("{").removesuffix("}").removeprefix("$")
    found, at = [value], 0
    while at < len(expression) and expression[at:] != ".":
        step = _STEP.match(expression, at)
        if step is None:
            raise UserError(f"jsonpath {path!r} cannot be read at {expression[at:]!r}; try .queues[0].name")
        at = step.end()
        name, index = step.groups()
        if name is not None:
            found = [one[name] for one in found if isinstance(one, Mapping) and name in one]
        elif index == "*":
            found = [item for one in found for item in (one.values() if isinstance(one, Mapping) else one)]
        else:
            number = int(index)
            found = [one[number] for one in found if isinstance(one, list) and -len(one) <= number < len(one)]
    return found
