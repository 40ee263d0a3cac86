"""Pipelines declared in Python: an object whose methods and decorators say what there is."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from queen.pipelines.checks import check
from queen.pipelines.declaration import Declaration, Sink, Source, Step
from queen.pipelines.errors import Where
from queen.pipelines.specs import SpecReader

F = TypeVar("F", bound=Callable[..., Any])


class Pipeline:
    """Builds the declaration of a pipeline.

        leads = Pipeline("leads")
        leads.source("events", queue="lead-events", schema="lead string, points int, at timestamp",
                     event_time="at", lateness="1 minute")

        @leads.step
        def hot(events):
            return events.where("points > 10")

        leads.window("scores", "hot", tumbling="1 minute", by=["lead"], aggregate={"score": "sum(points)"})
        leads.sink("out", "scores", queue="lead-scores", partition="lead")

    The words are those of the YAML form; docs/pipelines.md lists them.
    """

    def __init__(self, name: str, *, trigger: str = "1 second", dead_letters: Mapping[str, Any] | None = None) -> None:
        """`trigger`: how often batches begin, or `once`. `dead_letters`: a sink for records that cannot be used."""
        self._reader = SpecReader(self._function, lambda spec, key: None)
        self._name = name
        self._where = _caller()
        self._trigger = self._reader.trigger(trigger, self._where)
        self._sources: list[Source] = []
        self._steps: list[Step] = []
        self._sinks: list[Sink] = []
        self._dead_letters = (
            self._reader.sink("dead_letters", self._where, dead_letters, needs_source=False) if dead_letters else None
        )

    def source(self, name: str, **spec: Any) -> None:
        """Rows from a `queue`, from `files` of JSON lines, or at a `rate`."""
        _add(self._sources, self._reader.source(name, _caller(), spec))

    def sql(self, name: str, query: str, **timing: Any) -> None:
        """A query over what was declared before, by name."""
        self._step(name, _caller(), {"sql": query, **timing})

    def window(self, name: str, of: str, **spec: Any) -> None:
        """Aggregates over `tumbling`, `sliding` or `session` windows."""
        self._step(name, _caller(), {"from": of, **spec})

    def join(self, name: str, left: str, right: str, *, on: str, how: str = "inner", **timing: Any) -> None:
        """Two streams; `on` is an SQL condition over both by name, which bounds their event times."""
        self._step(name, _caller(), {"join": [left, right], "on": on, "how": how, **timing})

    def dedup(self, name: str, of: str, columns: Iterable[str], **timing: Any) -> None:
        """One row for each value of the columns."""
        self._step(name, _caller(), {"from": of, "dedup": list(columns), **timing})

    def step(self, function: F | None = None, **timing: Any) -> Any:
        """Decorates a function of DataFrames: its name is the step's, its parameters are its inputs."""

        def decorate(function: F) -> F:
            inputs = [name for name in inspect.signature(function).parameters if name != "spark"]
            self._step(function.__name__, _place(function), {"from": inputs, "frame": function, **timing})
            return function

        return decorate if function is None else decorate(function)

    def each(self, *, schema: str, of: str | None = None, **timing: Any) -> Callable[[F], F]:
        """Decorates a function that is called with each record as a dict, and returns a dict, a list of them or None.

        What it raises makes the record a dead letter. Its parameter names its input, unless `of` does.
        """

        def decorate(function: F) -> F:
            inputs = [of] if of is not None else list(inspect.signature(function).parameters)[:1]
            spec = {"from": inputs, "each": function, "schema": schema, **timing}
            self._step(function.__name__, _place(function), spec)
            return function

        return decorate

    def sink(self, name: str, of: str, **spec: Any) -> None:
        """Rows to a `queue`, a `topic`, `parquet` files, a `delta`, `iceberg` or `postgres` table or the `console`."""
        _add(self._sinks, self._reader.sink(name, _caller(), {"from": of, **spec}))

    def declaration(self) -> Declaration:
        """All that was declared. Raises `DeclarationError` with every problem."""
        declaration = Declaration(
            name=self._name,
            where=self._where,
            sources=tuple(self._sources),
            steps=tuple(self._steps),
            sinks=tuple(self._sinks),
            trigger=self._trigger,
            dead_letters=self._dead_letters,
        )
        check(declaration, self._reader.problems, self._reader.names)
        return declaration

    def _step(self, name: str, where: Where, spec: Mapping[str, Any]) -> None:
        _add(self._steps, self._reader.step(name, where, spec))

    def _function(self, given: object, where: Where) -> Callable[..., Any] | None:
        if callable(given):
            return given
        self._reader.report(where, f"{given!r} is not a function")
        return None


T = TypeVar("T")


def _add(entries: list[T], entry: T | None) -> None:
    if entry is not None:
        entries.append(entry)


def _caller() -> Where:
    """Where the method of `Pipeline` was called."""
    frame = sys._getframe(2)
    return Where(Path(frame.f_code.co_filename), frame.f_lineno)


def _place(function: Callable[..., Any]) -> Where:
    code = function.__code__
    return Where(Path(code.co_filename), code.co_firstlineno)
