"""Checks of a whole declaration that need no Spark: names, references, cycles, event times."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from queen.pipelines.declaration import Declaration, Dedup, Join, Sink, SourceKind, Sql, Step, Window
from queen.pipelines.errors import DeclarationError, Problem
from queen.suggestions import did_you_mean

# A name is a directory, a metric's label and a table in SQL.
_PIPELINE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NODE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def check(declaration: Declaration, known: Sequence[Problem], declared: Mapping[str, set[str]]) -> None:
    """Raises `DeclarationError` with all that is wrong, what was found before (`known`) included.

    `declared` are the names in the file, by section: those that are wrong are missing in the declaration, but not in
    the file.
    """
    problems = [*known, *_problems(declaration, declared)]
    if problems:
        raise DeclarationError(sorted(problems, key=lambda problem: problem.where.line))


def warnings(declaration: Declaration) -> Iterator[Problem]:
    """What works, but perhaps not as its author thinks."""
    used = {one.name for sink in declaration.sinks for one in declaration.upstream(sink.source)}
    for node in declaration.nodes:
        if node.name not in used:
            yield Problem(node.where, f"the rows of '{node.name}' are not used")
        if isinstance(node, Step) and isinstance(node.action, Dedup) and not declaration.event_time_of(node.inputs[0]):
            yield Problem(
                node.where,
                f"step '{node.name}' keeps every value forever, because its input has no event_time and lateness",
            )


def _problems(declaration: Declaration, declared: Mapping[str, set[str]]) -> Iterator[Problem]:
    if not _PIPELINE_NAME.fullmatch(declaration.name):
        text = f"the name of a pipeline must be up to 64 letters, digits, '.', '_' and '-', not {declaration.name!r}"
        yield Problem(declaration.where, text)
    if not declared["sources"]:
        yield Problem(declaration.where, "a pipeline needs a source")
    if not declared["sinks"]:
        yield Problem(declaration.where, "a pipeline needs a sink")
    yield from _names(declaration)
    yield from _references(declaration, declared["sources"] | declared["steps"])
    cycle = _cycle(declaration)
    if cycle is not None:
        yield Problem(cycle.where, f"step '{cycle.name}' depends on itself")
        return
    for source in declaration.sources:
        if source.kind is SourceKind.FILES and source.schema is None:
            yield Problem(source.where, f"source '{source.name}' needs 'schema', the fields of its lines of JSON")
    for step in declaration.steps:
        yield from _event_times(declaration, step)


def _names(declaration: Declaration) -> Iterator[Problem]:
    seen: dict[str, int] = {}
    for entry in (*declaration.nodes, *declaration.sinks):
        if not _NODE_NAME.fullmatch(entry.name):
            yield Problem(
                entry.where, f"a name must be letters, digits and '_', not beginning with a digit: {entry.name!r}"
            )
        if entry.name in seen:
            yield Problem(entry.where, f"'{entry.name}' is declared in line {seen[entry.name]} already")
        seen[entry.name] = entry.where.line


def _references(declaration: Declaration, declared: set[str]) -> Iterator[Problem]:
    names = sorted(declared)
    entries: tuple[Step | Sink, ...] = (*declaration.steps, *declaration.sinks)
    for entry in entries:
        # A sink without one is a problem of its own.
        inputs = entry.inputs if isinstance(entry, Step) else (entry.source,) if entry.source else ()
        what = "step" if isinstance(entry, Step) else "sink"
        if not inputs and isinstance(entry, Step) and isinstance(entry.action, Sql):
            yield Problem(entry.where, f"step '{entry.name}' reads from no source or step")
        for name in inputs:
            if name not in names:
                hint = did_you_mean(name, names, f"there are {', '.join(names) or 'none'}")
                yield Problem(
                    entry.where, f"{what} '{entry.name}' takes rows from '{name}', which does not exist; {hint}"
                )


def _cycle(declaration: Declaration) -> Step | None:
    for step in declaration.steps:
        if any(node.name == step.name for name in step.inputs for node in declaration.upstream(name)):
            return step
    return None


def _event_times(declaration: Declaration, step: Step) -> Iterator[Problem]:
    before = next((time for time in map(declaration.event_time_of, step.inputs) if time is not None), None)
    if step.event_time is not None and before is not None:
        yield Problem(step.where, f"the rows of step '{step.name}' have an event_time already: '{before}' of its input")
    if any(declaration.node(name) is None for name in step.inputs):
        # What is wrong with its input is a problem of its own.
        return
    if isinstance(step.action, Window) and step.inputs and not declaration.event_time_of(step.inputs[0]):
        yield Problem(
            step.where,
            f"step '{step.name}' has a window, but '{step.inputs[0]}' has no event_time and lateness",
        )
    if isinstance(step.action, Join):
        for name in step.inputs:
            if not declaration.event_time_of(name):
                yield Problem(
                    step.where, f"step '{step.name}' joins streams, but '{name}' has no event_time and lateness"
                )
