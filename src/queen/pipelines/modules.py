"""Runs Python files that declare pipelines or hold functions of theirs."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType

from queen.pipelines.errors import DeclarationError, Problem, Where


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
        raise DeclarationError([Problem(Where(path, error.lineno or 1), f"this is no Python: {error.msg}")]) from error
    except Exception as error:
        raise DeclarationError([Problem(Where(path, line_in(path, error)), _said(error))]) from error
    return module


def line_in(path: Path, error: BaseException) -> int:
    """The last line of the file that the error went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return (lines[-1] if lines else None) or 1


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
