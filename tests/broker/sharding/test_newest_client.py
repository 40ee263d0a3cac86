"""The newest published client's own tests, against a server that has two shards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from queen.embedded import EmbeddedPostgres
from tests.acceptance.served import served
from tests.acceptance.test_newest_python_client import ADDED, FORMS, FORMS_PATH, REFUSED, its_cases
from tests.broker.sharding.test_clients import make_databases


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_what_the_newest_client_added_works_over_shards(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    names = ("newest_0", "newest_1")
    asyncio.run(make_databases(postgres, names))
    (tmp_path / "server").mkdir()
    with served(tmp_path / "server", DATABASE_URLS=",".join(postgres.dsn(name) for name in names)) as server:
        files = [f"tests/{name}.py" for name in ADDED]
        cases, _ = its_cases(server, tmp_path, *files, FORMS_PATH, "-n", "3", "--dist", "loadfile")
    assert len(cases) == sum(ADDED.values()) - len(REFUSED) + FORMS
    for case in cases:
        failure = case.find("failure")
        # A transaction of queues that happen to live on different shards is refused, and says so.
        assert failure is None or "the transaction spans shards" in str(failure.text), (case.get("name"), failure)
    assert sum(case.find("failure") is None for case in cases) > len(cases) / 2
