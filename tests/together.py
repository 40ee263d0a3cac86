"""Which tests run in one process, one after the other, while others run beside them."""

from __future__ import annotations

from typing import Any, Final

import pytest
from xdist.scheduler import LoadGroupScheduling

TOGETHER: Final = {
    # All scenarios of a client are one run.
    "tests/acceptance/": "acceptance",
    # One JVM.
    "tests/spark/": "spark",
    "tests/pipelines/": "spark",
    # What they prepare takes longer than the tests themselves.
    "tests/integration/test_plans.py": "plans",
    "tests/integration/test_postgres_versions.py": "versions",
    "tests/integration/test_embedded_postgres.py": "embedded",
}


def group_of(nodeid: str) -> str:
    """The group of a test; one that is in none is its own."""
    return next((group for prefix, group in TOGETHER.items() if nodeid.startswith(prefix)), nodeid)


def by_group(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist would write the name of a group into a test's id, which this pytest does not let it."""
    scheduler = LoadGroupScheduling(config, log)
    scheduler._split_scope = group_of
    return scheduler
