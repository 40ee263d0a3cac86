"""Loads pipelines: Python files are run, YAML files are read."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import yaml

from queen.pipelines.builder import Pipeline
from queen.pipelines.checks import check
from queen.pipelines.declaration import Declaration
from queen.pipelines.errors import DeclarationError, PipelineError, Problem, Where
from queen.pipelines.specs import SpecReader
from queen.wire.yaml_text import check_aliases


def load_module(path: Path) -> ModuleType:
    """The file as a module. Raises `DeclarationError` with the line that failed."""
    # Not put into sys.modules: what Spark cannot import by name it sends to its workers as it is.
    module = ModuleType(f"queen_pipeline_{path.stem}")
    module.__file__ = str(path)
    try:
        code = compile(path.read_bytes(), str(path), "exec")
        exec(code, module.__dict__)
    except DeclarationError:
        raise
    except SyntaxError as error:
        raise DeclarationError([Problem(Where(path, error.lineno or 1), f"not valid Python: {error.msg}")]) from error
    except (Exception, SystemExit) as error:
        raise DeclarationError([Problem(Where(path, line_in(path, error)), _said(error))]) from error
    return module


def line_in(path: Path, error: BaseException) -> int:
    """The last line of the file that the error went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return (lines[-1] if lines else None) or 1


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_SECTIONS: Final = ("pipeline", "sources", "steps", "sinks", "trigger", "dead_letters")


class _Located(dict[str, Any]):
    """A mapping that knows in which lines its keys are."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}


def load_yaml(path: Path) -> Declaration:
    """The pipeline in the file. Raises `DeclarationError`."""
    return _File(path).declaration()


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = SpecReader(self._function, self._place)
        self._top = self._parse()

    def declaration(self) -> Declaration:
        reader, top = self._reader, self._top
        for key in top:
            if key not in _SECTIONS:
                reader.report(self._at(top, key), f"unknown section '{key}'; known are {', '.join(_SECTIONS)}")
        found: dict[str, list[Any]] = {}
        readers: dict[str, Callable[[str, Where, Mapping[str, Any]], Any]] = {
            "sources": reader.source,
            "steps": reader.step,
            "sinks": reader.sink,
        }
        for section, read in readers.items():
            entries = [read(name, where, spec) for name, where, spec in self._section(section)]
            found[section] = [entry for entry in entries if entry is not None]
        name = top.get("pipeline", self._path.stem)
        if not isinstance(name, str):
            reader.report(self._at(top, "pipeline"), f"'pipeline' must be a name, not {name!r}")
        dead_letters = None
        if isinstance(spec := top.get("dead_letters"), _Located):
            dead_letters = reader.sink("dead_letters", self._at(top, "dead_letters"), spec, needs_source=False)
        elif spec is not None:
            reader.report(self._at(top, "dead_letters"), "'dead_letters' must be a sink, such as {queue: errors}")
        trigger = reader.trigger(top.get("trigger", "1 second"), self._at(top, "trigger"))
        declaration = Declaration(
            name=str(name),
            where=self._at(top, "pipeline"),
            sources=tuple(found["sources"]),
            steps=tuple(found["steps"]),
            sinks=tuple(found["sinks"]),
            trigger=trigger,
            dead_letters=dead_letters,
        )
        check(declaration, reader.problems, reader.names)
        return declaration

    def _section(self, section: str) -> list[tuple[str, Where, Mapping[str, Any]]]:
        entries = self._top.get(section)
        if entries is None:
            return []
        if not isinstance(entries, _Located):
            self._reader.report(self._at(self._top, section), f"'{section}' must map names to declarations")
            return []
        found: list[tuple[str, Where, Mapping[str, Any]]] = []
        for name, spec in entries.items():
            if isinstance(spec, _Located):
                found.append((name, self._at(entries, name), spec))
            else:
                self._reader.names[section].add(name)
                self._reader.report(self._at(entries, name), f"'{name}' must be a declaration, not {spec!r}")
        return found

    def _parse(self) -> _Located:
        try:
            text = self._path.read_text("utf-8")
            check_aliases(text)
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            what = f"not valid YAML: {error.problem}"
            raise DeclarationError([Problem(Where(self._path, mark.line + 1 if mark else 1), what)]) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise DeclarationError([Problem(Where(self._path, 1), f"not valid YAML: {error}")]) from error
        value = self._value(node) if node is not None else None
        if self._reader.problems:
            raise DeclarationError(self._reader.problems)
        if not isinstance(value, _Located):
            raise DeclarationError([Problem(Where(self._path, 1), "a pipeline must have sources, steps and sinks")])
        return value

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            located = _Located()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    self._reader.report(Where(self._path, key.start_mark.line + 1), "a key must be text")
                    continue
                name = str(key.value)
                if name in located:
                    self._reader.report(Where(self._path, key.start_mark.line + 1), f"'{name}' is given twice")
                located[name] = self._value(value)
                located.lines[name] = key.start_mark.line + 1
            return located
        if isinstance(node, yaml.SequenceNode):
            return [self._value(one) for one in node.value]
        return yaml.SafeLoader("").construct_object(node)

    def _at(self, mapping: Mapping[str, Any], key: str) -> Where:
        return self._place(mapping, key) or Where(self._path, 1)

    def _place(self, mapping: Mapping[str, Any], key: str) -> Where | None:
        line = mapping.lines.get(key) if isinstance(mapping, _Located) else None
        return Where(self._path, line) if line else None

    def _function(self, given: object, where: Where) -> Callable[..., Any] | None:
        """`file.py:name`, the file beside this one."""
        file, _, name = str(given).rpartition(":")
        if not file.endswith(".py") or not name:
            self._reader.report(where, f"a function is given as file.py:name, not {given!r}")
            return None
        path = self._path.parent / file
        if not path.is_file():
            self._reader.report(where, f"there is no file {path}")
            return None
        function = getattr(load_module(path), name, None)
        if not callable(function):
            self._reader.report(where, f"{path} has no function '{name}'")
            return None
        found: Callable[..., Any] = function
        return found


def load(path: Path) -> Declaration:
    """The pipeline in a Python or YAML file, checked as far as that goes without Spark."""
    if not path.is_file():
        raise PipelineError(f"there is no file {path}")
    if path.suffix == ".py":
        declaration = _load_python(path)
    elif path.suffix in (".yaml", ".yml"):
        declaration = load_yaml(path)
    else:
        raise PipelineError(f"{path}: a pipeline is a Python file (.py) or a YAML file (.yaml, .yml)")
    return declaration


def _load_python(path: Path) -> Declaration:
    found = [value for value in vars(load_module(path)).values() if isinstance(value, Pipeline)]
    if len(found) == 1:
        return found[0].declaration()
    text = (
        f"the file declares {len(found)} pipelines; expected one"
        if found
        else "the file declares no pipeline; expected one, such as leads = queen.pipelines.Pipeline('leads')"
    )
    raise DeclarationError([Problem(Where(path, 1), text)])
