"""Loads the file that declares a pipeline."""

from __future__ import annotations

from pathlib import Path

from queen.pipelines.builder import Pipeline
from queen.pipelines.checks import check
from queen.pipelines.declaration import Declaration
from queen.pipelines.errors import DeclarationError, PipelineError, Problem, Where
from queen.pipelines.modules import load_module


def load(path: Path) -> Declaration:
    """The pipeline in a Python or YAML file, checked as far as that goes without Spark."""
    if not path.is_file():
        raise PipelineError(f"there is no file {path}")
    if path.suffix == ".py":
        declaration = _load_python(path)
    elif path.suffix in (".yaml", ".yml"):
        from queen.pipelines.yaml_file import load_yaml

        declaration = load_yaml(path)
    else:
        raise PipelineError(f"{path}: a pipeline is a Python file (.py) or a YAML file (.yaml, .yml)")
    check(declaration)
    return declaration


def _load_python(path: Path) -> Declaration:
    found = [value for value in vars(load_module(path)).values() if isinstance(value, Pipeline)]
    if len(found) == 1:
        return found[0].declaration()
    text = (
        f"the file makes {len(found)} pipelines, and should make one"
        if found
        else "the file makes no pipeline: leads = queen.pipelines.Pipeline('leads')"
    )
    raise DeclarationError([Problem(Where(path, 1), text)])
