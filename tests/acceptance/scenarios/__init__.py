"""The scenarios, a module for each subject."""

from __future__ import annotations

import importlib
import pkgutil

from tests.acceptance.scenario import Scenario


def all_scenarios() -> list[Scenario]:
    """Every scenario, in the order they are written, module by module."""
    return [
        value
        for found in pkgutil.iter_modules(__path__)
        for value in vars(importlib.import_module(f"{__name__}.{found.name}")).values()
        if isinstance(value, Scenario)
    ]
