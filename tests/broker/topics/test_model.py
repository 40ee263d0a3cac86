"""Random histories of a topic against a model, over one worker and over two."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import StartServer
from tests.support.ageing import until
from tests.support.api import Api
from tests.support.database import Connection
from tests.support.topic_api import TopicApi, item, named
from tests.support.topic_model import MAX_RETRIES, TopicModel

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
NAMES = itertools.count()


@dataclass(frozen=True)
class Enqueue:
    """Items: (priority, when, key). `when`: a second of the past, None for now, or "later"."""

    worker: int
    items: list[tuple[int, int | str | None, int | None]]


@dataclass(frozen=True)
class Dequeue:
    worker: int
    limit: int


@dataclass(frozen=True)
class Settle:
    """Acks, nacks, dead-letters, extends or releases some items of an earlier delivery, counted from the newest."""

    worker: int
    action: str
    delivery: int
    which: list[int]
    with_owner: bool


@dataclass(frozen=True)
class Dead:
    """Redrives a dead letter, or throws it away."""

    worker: int
    action: str
    which: int


@dataclass(frozen=True)
class Expire:
    worker: int


@dataclass(frozen=True)
class Advance:
    worker: int


@dataclass(frozen=True)
class Purge:
    worker: int
    leased: bool


@dataclass(frozen=True)
class DeadMany:
    """Redrives dead letters, or throws them away; some of them are none any more."""

    worker: int
    action: str
    which: list[int]


@dataclass(frozen=True)
class Pause:
    worker: int
    action: str


@dataclass(frozen=True)
class Configure:
    worker: int
    max_retries: int
    at_most_once: bool


@dataclass(frozen=True)
class Recreate:
    """The topic is deleted with all that is in it, and made again."""

    worker: int


@dataclass(frozen=True)
class Look:
    """What a topic is said to hold is what the model says."""

    worker: int


workers = st.integers(0, 1)
priorities = st.sampled_from([0, 0, 0, 1, 5, -3])
whens = st.sampled_from([None, None, None, 1, 2, 30, "later"])
keys = st.sampled_from([None, None, None, 1, 2, 3, 4])
enqueues = st.builds(Enqueue, workers, st.lists(st.tuples(priorities, whens, keys), min_size=1, max_size=5))
dequeues = st.builds(Dequeue, workers, st.integers(1, 6))
settlements = st.builds(
    Settle,
    workers,
    st.sampled_from(["ack", "ack", "ack", "nack", "nack", "release", "extend", "dead-letter"]),
    st.sampled_from([0, 0, 0, 1, 1, 2, 4]),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.booleans(),
)
operators = st.one_of(
    st.builds(
        DeadMany, workers, st.sampled_from(["retry", "delete"]), st.lists(st.integers(0, 5), min_size=1, max_size=5)
    ),
    st.builds(Purge, workers, st.booleans()),
    st.builds(Pause, workers, st.sampled_from(["pause", "resume", "resume"])),
    st.builds(Configure, workers, st.integers(0, 2), st.sampled_from([False, False, False, True])),
    st.builds(Recreate, workers),
    st.builds(Look, workers),
    st.builds(Look, workers),
)
steps = st.one_of(
    enqueues,
    enqueues,
    dequeues,
    dequeues,
    settlements,
    settlements,
    st.builds(Dead, workers, st.sampled_from(["retry", "retry", "delete"]), st.integers(0, 3)),
    st.builds(Expire, workers),
    st.builds(Advance, workers),
    st.builds(Advance, workers),
    operators,
)
histories = st.lists(steps, min_size=15, max_size=50)


class Run:
    """One history on a topic of its own."""

    def __init__(self, servers: list[Api], connection: Connection, mode: str) -> None:
        self.mode = mode
        self.namespace = f"ns-{next(NAMES)}"
        self.servers = servers
        self.connection = connection
        self.model = TopicModel()
        self.deliveries: list[list[dict[str, Any]]] = []

    def at(self, worker: int) -> TopicApi:
        return TopicApi(self.servers[worker % len(self.servers)])

    async def begin(self) -> None:
        await self.configure(Configure(0, MAX_RETRIES, at_most_once=False))
        await self.at(0).good("PUT", "/modes", {"namespace": self.namespace, "mode": self.mode})

    async def step(self, operation: Any) -> None:
        handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            Enqueue: self.enqueue,
            Dequeue: self.dequeue,
            Settle: self.settle,
            Dead: self.dead,
            Expire: self.expire,
            Advance: self.advance,
            Purge: self.purge,
            DeadMany: self.dead_many,
            Pause: self.pause,
            Configure: self.configure,
            Recreate: self.recreate,
            Look: self.look,
        }
        await handlers[type(operation)](operation)

    async def enqueue(self, enqueue: Enqueue) -> None:
        sent = []
        for priority, when, key in enqueue.items:
            fields: dict[str, Any] = {"priority": priority, "idempotency_key": f"k{key}" if key else None}
            if when == "later":
                fields["delay"] = 3600
            elif when is not None:
                fields["deliver_after"] = f"2026-01-01T00:00:{when:02}Z"
            sent.append(item(None, namespace=self.namespace, **fields))
        ids = await self.at(enqueue.worker).enqueue(*sent)
        await self.flushed()
        for id, one in zip(ids, sent, strict=True):
            due = await self._due(id)
            if one.get("deliver_after") and not one["idempotency_key"]:
                assert due == datetime.fromisoformat(one["deliver_after"])
            self.model.enqueued(id, one["priority"], due, one["idempotency_key"])

    async def flushed(self) -> None:
        """Until everything that was enqueued is to be seen, which is what the promises are about."""
        worker = self.servers[0].worker
        assert worker is not None
        buffer = worker.broker.topics.buffer

        async def empty() -> bool:
            return not buffer.holds([self.namespace])

        await until(empty)

    async def dequeue(self, dequeue: Dequeue) -> None:
        now = await self.connection.fetchval("SELECT clock_timestamp()")
        expected = self.model.next(now, dequeue.limit)
        got = await self.at(dequeue.worker).dequeue(dequeue.limit, namespace=self.namespace)
        assert [(one["id"], one["retries"]) for one in got] == [(one.id, one.retries) for one in expected]
        if got:
            self.model.lease(expected, got[0]["lease_owner"])
            self.deliveries.append(got)

    async def settle(self, settle: Settle) -> None:
        if settle.delivery >= len(self.deliveries):
            return
        delivery = self.deliveries[-1 - settle.delivery]
        chosen = [delivery[index] for index in dict.fromkeys(index % len(delivery) for index in settle.which)]
        # What is removed on delivery has no lease.
        owner = settle.with_owner and delivery[0]["lease_owner"]
        refs = [named(one, **({"lease_owner": one["lease_owner"]} if owner else {})) for one in chosen]
        action, for_good = settle.action, settle.action == "dead-letter"
        if for_good:
            action, refs = "nack", [ref | {"dlq": True} for ref in refs]
        results = await self.at(settle.worker).good("POST", f"/{action}", refs)
        for ref, result in zip(refs, results, strict=True):
            if action == "ack":
                assert result["success"] == self.model.ack(ref["id"], ref.get("lease_owner"))
                continue
            if action == "release":
                assert result["success"] == self.model.release(ref["id"], ref.get("lease_owner"))
                continue
            if action == "extend":
                assert result["success"] == bool(self.model.leased(ref["id"], ref.get("lease_owner")))
                continue
            outcome = self.model.nack(ref["id"], ref.get("lease_owner"), for_good=for_good)
            assert (result["success"], result.get("dlq")) == (bool(outcome), outcome and outcome == "dead")
            if outcome == "ready":
                self.model.items[ref["id"]].due = await self._due(ref["id"])

    async def dead(self, dead: Dead) -> None:
        letters = await self.at(dead.worker).dead(namespace=self.namespace, limit=1000)
        assert {one["id"]: one["retries"] for one in letters} == {
            id: item.retries for id, item in self.model.dead.items()
        }
        if not letters:
            return
        chosen = letters[dead.which % len(letters)]
        (result,) = await self.at(dead.worker).good("POST", f"/dlq/{dead.action}", [named(chosen)])
        assert result["success"]
        if dead.action == "delete":
            del self.model.dead[chosen["id"]]
        else:
            assert self.model.retry_dead(chosen["id"])
            self.model.items[chosen["id"]].due = await self._due(chosen["id"])

    async def expire(self, expire: Expire) -> None:
        await self.connection.execute(
            "UPDATE queen.topic_items SET leased_until = clock_timestamp() - interval '1 ms'"
            " WHERE leased_until IS NOT NULL AND topic_id IN (SELECT t.id FROM queen.topics t"
            " JOIN queen.topic_namespaces n ON n.id = t.namespace_id WHERE n.name = $1)",
            self.namespace,
        )
        worker = self.at(expire.worker).api.worker
        assert worker is not None
        await worker.broker.topics.expiry.search()
        self.model.expire()

    async def advance(self, advance: Advance) -> None:
        worker = self.at(advance.worker).api.worker
        assert worker is not None
        topic = await worker.broker.topics.catalog.one((self.namespace, "t"))
        assert topic is not None
        await worker.broker.topics.heads.advance(topic.id)

    async def purge(self, purge: Purge) -> None:
        body = {"namespace": self.namespace, "topic": "t", "leased": purge.leased}
        answer = await self.at(purge.worker).good("POST", "/purge", body)
        assert answer["removed"] == self.model.purge(leased=purge.leased)

    async def dead_many(self, many: DeadMany) -> None:
        known = [*self.model.dead, *self.model.items, 1]
        ids = list(dict.fromkeys(known[index % len(known)] for index in many.which))
        refs = [{"id": id, "namespace": self.namespace, "topic": "t"} for id in ids]
        results = await self.at(many.worker).good("POST", f"/dlq/{many.action}", refs)
        for id, result in zip(ids, results, strict=True):
            if many.action == "delete":
                assert result["success"] == bool(self.model.dead.pop(id, None))
                continue
            retried = self.model.retry_dead(id)
            assert result["success"] == retried
            if retried:
                self.model.items[id].due = await self._due(id)

    async def pause(self, pause: Pause) -> None:
        body = {"namespace": self.namespace, "topic": "t"}
        answer = await self.at(pause.worker).good("POST", f"/{pause.action}", body)
        paused = pause.action == "pause"
        assert answer["changed"] == (paused != self.model.paused)
        self.model.paused = paused

    async def configure(self, configure: Configure) -> None:
        await self.at(configure.worker).configure(
            namespace=self.namespace,
            max_retries=configure.max_retries,
            at_most_once=configure.at_most_once,
            backoff_base_ms=0,
            lease_seconds=3600,
        )
        self.model.max_retries, self.model.at_most_once = configure.max_retries, configure.at_most_once

    async def recreate(self, recreate: Recreate) -> None:
        answer = await self.at(recreate.worker).good("DELETE", "", namespace=self.namespace, topic="t")
        assert answer["deleted"] is True
        # Keys of items that were processed are the namespace's, and stay.
        self.model.purge()
        keys, self.model = self.model.keys, TopicModel()
        self.model.keys = keys
        await self.configure(Configure(recreate.worker, MAX_RETRIES, at_most_once=False))

    async def look(self, look: Look) -> None:
        now = await self.connection.fetchval("SELECT clock_timestamp()")
        assert await self.at(look.worker).counts(namespace=self.namespace) == self.model.counts(now)
        items = await self.at(look.worker).good("GET", "/peek", namespace=self.namespace, topic="t", limit=1000)
        assert [one["id"] for one in items] == [one.id for one in self.model.first(now, 1000)]

    async def check(self) -> None:
        """What is left comes out in order, and nothing else is stored."""
        await self.configure(Configure(0, MAX_RETRIES, at_most_once=False))
        await self.pause(Pause(1, "resume"))
        await self.look(Look(1))
        await self.expire(Expire(0))
        await self.dequeue(Dequeue(1, 1000))
        await self.dead(Dead(0, "retry", 0))
        stored = await self.connection.fetch(
            "SELECT i.id FROM queen.topic_items i JOIN queen.topics t ON t.id = i.topic_id"
            " JOIN queen.topic_namespaces n ON n.id = t.namespace_id WHERE n.name = $1",
            self.namespace,
        )
        assert {row["id"] for row in stored} == set(self.model.items)

    async def _due(self, id: int) -> datetime:
        """For when an item is stored; a duplicate's may be gone."""
        due = await self.connection.fetchval("SELECT deliver_after FROM queen.topic_items WHERE id = $1", id)
        return due if due is not None else datetime.min


@pytest.fixture
async def servers(start_server: StartServer, topology: str) -> list[Api]:
    if topology.startswith("one worker"):
        return [await start_server()]
    return [await start_server(worker_id=id, num_workers=2) for id in range(2)]


@pytest.mark.timeout(24 * 3600 if SOAK else 600)
@pytest.mark.parametrize("topology", ["one worker", "two workers", "one worker, buffered", "two workers, buffered"])
@settings(
    max_examples=2000 if SOAK else 16,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=histories)
async def test_any_history_of_a_topic_keeps_every_promise(
    servers: list[Api], connection: Connection, history: list[Any], topology: str
) -> None:
    run = Run(servers, connection, "buffered" if topology.endswith("buffered") else "sync")
    await run.begin()
    for operation in history:
        await run.step(operation)
    await run.check()
