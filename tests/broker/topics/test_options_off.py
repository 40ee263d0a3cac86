"""What is optional and off costs nothing: no import, no statement."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from queen.storage.database import Database, Link, Record
from tests.conftest import StartServer
from tests.support.topic_api import TopicApi, item, named

OPTIONAL = (
    "queen.broker.topics.prefetch",
    "queen.broker.topics.prefetching",
    "queen.broker.topics.log_copies",
    "queen.broker.topics.throttle",
    "queen.broker.sharding.sharded_broker",
    "queen.celery",
    "queen.http.auth.tokens",
    "queen.http.sqs",
    "queen.http.tracing",
    "queen.pipelines",
    "queen.proxy",
    "queen.redis.link",
    "queen.redis.stores",
    "queen.spark",
    "aiohttp",
    "celery",
    "cryptography",
    "joserfc",
    "opentelemetry",
    "prometheus_client",
    "pyspark",
    "redis",
    "yaml",
)


def test_no_optional_module_is_imported_by_a_server_that_does_not_use_it() -> None:
    program = f"""
import sys, queen.server.worker
print(*(name for name in {OPTIONAL!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


async def test_without_prefetch_buffers_no_statement_is_about_them(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def spied(kind: type[Database] | type[Link]) -> None:
        fetch = kind.fetch

        async def noted(self: Any, name: str, *args: Any) -> list[Record]:
            names.append(name)
            return await fetch(self, name, *args)

        monkeypatch.setattr(kind, "fetch", noted)

    spied(Database)
    spied(Link)
    topics = TopicApi(await start_server(namespace_courtesy=0))
    assert topics.api.worker is not None
    inside = topics.api.worker.broker.topics
    await topics.enqueue(*(item(number) for number in range(5)))
    leased = await topics.dequeue(5)
    await topics.nack(leased[0])
    for operation in ("extend", "release"):
        await topics.good("POST", f"/{operation}", [named(leased[1])])
    assert await topics.ack(*leased[2:]) == [True] * 3
    await topics.good("GET", "/dequeue/many", namespace="ns")
    assert await topics.dequeue(topic="nothing") == []
    await inside.expiry.search(everywhere=True)
    await topics.good("POST", "/purge", {"namespace": "ns", "topic": "t"})
    assert (inside.prefetch, inside.throttle, inside.redis) == (None, None, None)
    assert {"topic_claim", "topic_ack", "topic_nack", "topic_extend", "topic_release"} <= set(names)
    # The elected worker runs a job each minute that frees what a crashed server left; it has a session of its own.
    assert [name for name in names if "ready" in name or "handouts" in name or "prefetch" in name] == []
