"""Reads what a file says of a source, a step or a sink, and gathers every problem with its place.

YAML and Python say it with the same words, so there is one reader for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from queen.errors import BadRequest
from queen.pipelines.declaration import (
    SINK_OPTIONS,
    SOURCE_OPTIONS,
    Action,
    Dedup,
    Each,
    Frame,
    Join,
    OutputMode,
    Sink,
    SinkKind,
    Source,
    SourceKind,
    Sql,
    Step,
    Window,
    WindowKind,
    tables_of,
)
from queen.pipelines.errors import PipelineError, Problem, Where
from queen.pipelines.tables.locations import Location
from queen.suggestions import did_you_mean
from queen.wire.push import check_name
from queen.wire.times import EXPECTED_DURATION, duration_ms

_LIMITS: Final = ("rows_per_batch", "min_rows_per_batch", "bytes_per_batch", "min_bytes_per_batch")
_TIMED: Final = ("event_time", "lateness", "expect")
_WINDOWS: Final = tuple(kind.value for kind in WindowKind)
_ACTIONS: Final = ("sql", "frame", "each", *_WINDOWS, "join", "dedup")
_SHARE: Final = re.compile(r"[0-9]*\.?[0-9]+")
_STARTS: Final = ("earliest", "latest")
_JOINS: Final = ("inner", "left_outer", "right_outer", "full_outer", "left_semi")

Function = Callable[[object, Where], Callable[..., Any] | None]
"""Finds the function that a file names; None (and a problem) when there is none."""


class SpecReader:
    """Makes declarations of what a file says; `problems` has everything that is wrong with it."""

    def __init__(self, function: Function, place: Callable[[Mapping[str, Any], str], Where | None]) -> None:
        """`place` knows where in the file a key of a spec is."""
        self.problems: list[Problem] = []
        self.names: dict[str, set[str]] = {"sources": set(), "steps": set(), "sinks": set()}
        """Everything that the file declares, also what is wrong."""
        self._function = function
        self._place = place

    def source(self, name: str, where: Where, spec: Mapping[str, Any]) -> Source | None:
        self.names["sources"].add(name)
        kind = self._one_of(f"source '{name}'", where, spec, [kind.value for kind in SourceKind])
        if kind is None:
            return None
        allowed = SOURCE_OPTIONS[SourceKind(kind)]
        self._known(f"source '{name}'", where, spec, (kind, "schema", *_TIMED, *allowed))
        texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in spec.items()}
        options = {key: value for key in allowed if (value := self._text(texts, key, where)) is not None}
        if options.get("fail_on_data_loss", "true") not in ("true", "false"):
            self.report(self._where(spec, "fail_on_data_loss", where), "'fail_on_data_loss' must be true or false")
        if options.get("start", "earliest") not in _STARTS:
            self._unknown(self._where(spec, "start", where), f"source '{name}': start", options["start"], _STARTS)
        for key in (*_LIMITS, "files_per_batch", "max_tasks"):
            self._positive(options, key, spec, where)
        self._share(options, "max_read_share", spec, where)
        self._holding_back(f"source '{name}'", options, spec, where)
        if kind == "queue_pattern":
            self._pattern(spec, kind, where)
        if kind == "rate":
            self._positive({kind: str(spec[kind])}, kind, spec, where)
        return Source(
            name=name,
            where=where,
            kind=SourceKind(kind),
            target=str(spec[kind]) if kind == "rate" else self._text(spec, kind, where) or "",
            schema=self._text(spec, "schema", where),
            options=options,
            **self._timing(f"source '{name}'", where, spec),
        )

    def step(self, name: str, where: Where, spec: Mapping[str, Any]) -> Step | None:
        self.names["steps"].add(name)
        what = f"step '{name}'"
        kind = self._one_of(what, where, spec, _ACTIONS)
        if kind is None:
            return None
        action = self._action(what, kind, where, spec)
        if action is None:
            return None
        return Step(
            name=name,
            where=where,
            action=action,
            inputs=self._inputs(what, action, where, spec),
            **self._timing(what, where, spec),
        )

    def sink(self, name: str, where: Where, spec: Mapping[str, Any], needs_source: bool = True) -> Sink | None:
        self.names["sinks"].add(name)
        what = f"sink '{name}'"
        kind = self._one_of(what, where, spec, [kind.value for kind in SinkKind])
        if kind is None:
            return None
        allowed = SINK_OPTIONS[SinkKind(kind)]
        self._known(what, where, spec, (kind, "from", *allowed))
        source = self._text(spec, "from", where)
        if spec.get("from") is None and needs_source:
            self.report(where, f"{what} needs 'from', the source or step whose rows it takes")
        target = "" if kind == "console" else self._text(spec, kind, where) or ""
        if kind == "topic" and target.count("/") != 1:
            self.report(self._where(spec, kind, where), f"{what}: a topic is given as namespace/topic, not {target!r}")
        elif kind in ("queue", "topic") and target:
            self._name_of(what, kind, target, self._where(spec, kind, where))
        if kind in ("parquet", "delta", "iceberg") and target:
            self._directory(what, spec, kind, where)
        options = {key: value for key in allowed if (value := self._listed(spec, key, where)) is not None}
        self._positive(options, "rows", spec, where)
        if options.get("mode", OutputMode.APPEND) not in tuple(OutputMode):
            self._unknown(self._where(spec, "mode", where), f"{what}: mode", options["mode"], tuple(OutputMode))
            del options["mode"]
        if (
            kind in ("postgres", "delta", "iceberg")
            and options.get("mode") == OutputMode.UPDATE
            and "key" not in options
        ):
            text = f"{what}: mode update needs 'key', the columns that say which row a changed result replaces"
            self.report(self._where(spec, "mode", where), text)
        if "delete_when" in options and "key" not in options:
            self.report(
                self._where(spec, "delete_when", where), f"{what}: 'delete_when' needs 'key', by which rows are found"
            )
        return Sink(name=name, where=where, source=source or "", kind=SinkKind(kind), target=target, options=options)

    def trigger(self, given: object, where: Where) -> str:
        """How often batches begin."""
        text = str(given)
        if text != "once" and duration_ms(text) is None:
            self.report(where, f"trigger: {text!r} is neither 'once' nor {EXPECTED_DURATION}")
        return text

    def report(self, where: Where, text: str) -> None:
        self.problems.append(Problem(where, text))

    def _action(self, what: str, kind: str, where: Where, spec: Mapping[str, Any]) -> Action | None:
        if kind in _WINDOWS:
            return self._window(what, WindowKind(kind), where, spec)
        if kind == "join":
            self._known(what, where, spec, ("join", "on", "how", *_TIMED))
            how = self._text(spec, "how", where) or "inner"
            if how not in _JOINS:
                self._unknown(self._where(spec, "how", where), f"{what}: how", how, _JOINS)
            on = self._text(spec, "on", where)
            if on is None:
                self.report(where, f"{what} needs 'on', the condition that joins its inputs")
            return Join(on or "", how)
        if kind == "sql":
            self._known(what, where, spec, ("sql", *_TIMED))
            text = self._text(spec, "sql", where)
            return Sql(text) if text else None
        if kind == "dedup":
            self._known(what, where, spec, ("dedup", "from", *_TIMED))
            columns = self._names(spec, "dedup", where)
            if not columns and not spec["dedup"]:
                self.report(self._where(spec, "dedup", where), f"{what} needs the columns that make a row the same")
            return Dedup(columns)
        self._known(what, where, spec, (kind, "from", *(("schema",) if kind == "each" else ()), *_TIMED))
        function = self._function(spec[kind], self._where(spec, kind, where))
        if function is None:
            return None
        if kind == "frame":
            return Frame(function)
        schema = self._text(spec, "schema", where)
        if schema is None:
            self.report(where, f"{what} needs 'schema', the fields of what its function returns")
        return Each(function, schema or "")

    def _window(self, what: str, kind: WindowKind, where: Where, spec: Mapping[str, Any]) -> Window:
        known = (kind.value, "from", "by", "aggregate", *_TIMED)
        self._known(what, where, spec, (*known, "every") if kind is WindowKind.SLIDING else known)
        size = self._duration(what, spec, kind.value, where)
        slide = self._duration(what, spec, "every", where) if "every" in spec else None
        if kind is WindowKind.SLIDING and slide is None:
            self.report(where, f"{what} needs 'every', how far apart its sliding windows begin")
        if slide is not None and (duration_ms(slide) or 0) > (duration_ms(size) or 0):
            self.report(self._where(spec, "every", where), f"{what}: 'every' must not be longer than the window")
        aggregate = self._mapping(what, spec, "aggregate", where)
        if not aggregate:
            self.report(where, f"{what} needs 'aggregate', such as {{total: sum(amount)}}")
        return Window(kind, size, aggregate, slide, self._names(spec, "by", where))

    def _inputs(self, what: str, action: Action, where: Where, spec: Mapping[str, Any]) -> tuple[str, ...]:
        if isinstance(action, Sql):
            return tables_of(action.text)
        if isinstance(action, Join):
            inputs = self._names(spec, "join", where)
            if len(set(inputs)) != 2:
                self.report(self._where(spec, "join", where), f"{what} joins two different inputs, not {len(inputs)}")
            return inputs
        inputs = self._names(spec, "from", where)
        if not inputs:
            self.report(where, f"{what} needs 'from', the source or step whose rows it takes")
        elif len(inputs) > 1 and not isinstance(action, Frame):
            self.report(self._where(spec, "from", where), f"{what} takes one input, not {len(inputs)}")
        return inputs

    def _timing(self, what: str, where: Where, spec: Mapping[str, Any]) -> dict[str, Any]:
        event_time = self._text(spec, "event_time", where)
        lateness = self._duration(what, spec, "lateness", where) if "lateness" in spec else None
        if lateness is not None and event_time is None:
            self.report(where, f"{what}: 'lateness' says how late an event may come, and needs 'event_time'")
        if event_time is not None and lateness is None:
            self.report(where, f"{what}: 'event_time' needs 'lateness', how late an event may come")
        return {
            "event_time": event_time,
            "lateness": lateness,
            "expect": self._mapping(what, spec, "expect", where) if "expect" in spec else {},
        }

    def _one_of(self, what: str, where: Where, spec: Mapping[str, Any], kinds: Iterable[str]) -> str | None:
        kinds = tuple(kinds)
        found = [kind for kind in kinds if kind in spec]
        if len(found) == 1:
            return found[0]
        if found:
            self.report(where, f"{what} must have only one of {' and '.join(found)}")
            return None
        hint = next((f"; {hint}" for key in spec if (hint := did_you_mean(key, kinds))), "")
        self.report(where, f"{what} needs one of {', '.join(kinds)}{hint}")
        return None

    def _known(self, what: str, where: Where, spec: Mapping[str, Any], keys: Iterable[str]) -> None:
        keys = tuple(keys)
        for key in spec:
            if key not in keys:
                self._unknown(self._where(spec, key, where), what, key, keys)

    def _unknown(self, where: Where, what: str, word: str, words: Iterable[str]) -> None:
        words = tuple(words)
        hint = did_you_mean(word, words, f"known are {', '.join(words)}")
        self.report(where, f"{what}: unknown '{word}'; {hint}")

    def _text(self, spec: Mapping[str, Any], key: str, where: Where) -> str | None:
        value = spec.get(key)
        if value is None:
            return None
        if isinstance(value, bool | Mapping | list | tuple) or not str(value).strip():
            self.report(self._where(spec, key, where), f"'{key}' must be text, not {value!r}")
            return None
        return str(value)

    def _listed(self, spec: Mapping[str, Any], key: str, where: Where) -> str | None:
        """Text, or a list of names as one text."""
        if isinstance(spec.get(key), list | tuple):
            return ",".join(self._names(spec, key, where))
        return self._text(spec, key, where)

    def _names(self, spec: Mapping[str, Any], key: str, where: Where) -> tuple[str, ...]:
        value = spec.get(key)
        if value is None:
            return ()
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            self.report(self._where(spec, key, where), f"'{key}' must be a name or a list of names, not {value!r}")
            return ()
        return tuple(names)

    def _mapping(self, what: str, spec: Mapping[str, Any], key: str, where: Where) -> dict[str, str]:
        value = spec.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
            self.report(self._where(spec, key, where), f"{what}: '{key}' must name expressions, not {value!r}")
            return {}
        return {str(name): text for name, text in value.items()}

    def _duration(self, what: str, spec: Mapping[str, Any], key: str, where: Where) -> str:
        text = str(spec.get(key))
        found = duration_ms(text)
        if found is None or (found == 0 and key != "lateness"):
            self.report(self._where(spec, key, where), f"{what}: {key}: {text!r} is not {EXPECTED_DURATION}")
        return text

    def _name_of(self, what: str, kind: str, target: str, where: Where) -> None:
        try:
            for name in target.split("/") if kind == "topic" else (target,):
                check_name(name, f"the name of a {kind}", what)
        except BadRequest as error:
            self.report(where, str(error))

    def _positive(self, options: Mapping[str, str], key: str, spec: Mapping[str, Any], where: Where) -> None:
        text = options.get(key)
        if text is not None and not (text.isascii() and text.isdigit() and int(text) > 0):
            self.report(self._where(spec, key, where), f"'{key}' must be a whole number above 0, not {text!r}")

    def _share(self, options: Mapping[str, str], key: str, spec: Mapping[str, Any], where: Where) -> None:
        text = options.get(key)
        if text is not None and not (_SHARE.fullmatch(text) and 0.01 <= float(text) <= 1):
            said = f"'{key}' must be a share of the machine from 0.01 to 1, not {text!r}"
            self.report(self._where(spec, key, where), said)

    def _pattern(self, spec: Mapping[str, Any], key: str, where: Where) -> None:
        text = self._text(spec, key, where)
        try:
            re.compile(text or "")
        except re.error as error:
            self.report(self._where(spec, key, where), f"'{key}' is not a regular expression: {text!r} ({error})")

    def _directory(self, what: str, spec: Mapping[str, Any], kind: str, where: Where) -> None:
        place = self._where(spec, kind, where)
        try:
            location = Location.parse(str(spec[kind]))
        except PipelineError as error:
            self.report(place, f"{what}: {error}")
            return
        if kind == "parquet" and location.path is None:
            self.report(place, f"{what}: plain Parquet is written to directories; in an object store use delta")

    def _holding_back(self, what: str, options: Mapping[str, str], spec: Mapping[str, Any], where: Where) -> None:
        """A batch may wait for a minimum of rows or bytes, up to a maximum delay."""
        for limit in ("rows_per_batch", "bytes_per_batch"):
            least, most = options.get(f"min_{limit}", ""), options.get(limit, "")
            if least.isdigit() and most.isdigit() and int(least) > int(most):
                text = f"{what}: 'min_{limit}' ({least}) must not be above '{limit}' ({most})"
                self.report(self._where(spec, f"min_{limit}", where), text)
        if "max_delay" in options:
            self._duration(what, spec, "max_delay", where)
            if "min_rows_per_batch" not in options and "min_bytes_per_batch" not in options:
                text = (
                    f"{what}: 'max_delay' is how long a batch waits for 'min_rows_per_batch' or 'min_bytes_per_batch':"
                    " give that as well"
                )
                self.report(self._where(spec, "max_delay", where), text)

    def _where(self, spec: Mapping[str, Any], key: str, otherwise: Where) -> Where:
        return self._place(spec, key) or otherwise
