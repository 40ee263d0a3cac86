"""Runs the `queen` command as in the image: with the extras server, redis and otel, without what others need."""

import sys
import tomllib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def missing() -> set[str]:
    """Modules of packages that the extra spark names, and none of the image's."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def names(lines: list[str]) -> set[str]:
        return {canonicalize_name(Requirement(line).name) for line in lines}

    present = names(project["dependencies"]).union(*(names(extras[extra]) for extra in ("server", "redis", "otel")))
    absent = names(extras["spark"]) - present
    return {
        module
        for module, distributions in packages_distributions().items()
        if absent & {canonicalize_name(distribution) for distribution in distributions}
    }


class Missing(MetaPathFinder):
    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


if __name__ == "__main__":
    modules = missing()
    assert "pyspark" in modules
    sys.meta_path.insert(0, Missing(modules))
    from queen.cli import main

    main()
