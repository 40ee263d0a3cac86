"""Random histories against a model: order, one lease, redelivery right after the last ack, one message per id."""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import StartServer
from tests.support.api import Api
from tests.support.database import Connection, dead_letters, expire_leases, make_queue, stored_messages
from tests.support.model import RETRY_LIMIT, Ack, Outcome, QueueModel

SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
NAMES = itertools.count()

PARTITIONS = ("a", "b", "c")
GROUPS = ("__QUEUE_MODE__", "readers")

workers = st.integers(0, 1)
partitions = st.sampled_from(["a", "a", "a", "b", "b", "c"])
groups = st.sampled_from([GROUPS[0], GROUPS[0], GROUPS[1]])
statuses = st.sampled_from(["completed"] * 5 + ["failed"] * 2 + ["retry", "dlq"])


@dataclass(frozen=True)
class Nothing:
    """What a step shrinks to."""


class History(list[Any]):
    """Steps, shown without those that do nothing."""

    def __repr__(self) -> str:
        return "".join(f"\n    {step}" for step in self if not isinstance(step, Nothing))


@dataclass(frozen=True)
class Push:
    worker: int
    items: list[tuple[str, int]]


@dataclass(frozen=True)
class Pop:
    worker: int
    group: str
    partition: str | None
    batch: int
    partitions: int
    auto_ack: bool


@dataclass(frozen=True)
class AckSome:
    """Acks of one earlier delivery, counted from the newest: each (which message, status), in any order."""

    worker: int
    delivery: int
    items: list[tuple[int, str]]
    with_lease: bool
    single: bool


@dataclass(frozen=True)
class AckAll:
    worker: int
    delivery: int
    status: str


@dataclass(frozen=True)
class Renew:
    worker: int
    delivery: int


@dataclass(frozen=True)
class Expire:
    pass


@dataclass(frozen=True)
class Seek:
    """To the end, to the beginning, or to the time of the first message of a delivery."""

    worker: int
    group: str
    where: str
    delivery: int


@dataclass(frozen=True)
class Transaction:
    worker: int
    items: list[tuple[str, int]]
    delivery: int
    acks: list[tuple[int, str]]
    with_lease: bool


items = st.lists(st.tuples(partitions, st.integers(0, 40)), min_size=1, max_size=5)
# Mostly the newest delivery, sometimes one that is over.
deliveries = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 5])
mostly = st.sampled_from([True, True, True, True, False])
some_acks = st.lists(st.tuples(st.integers(0, 4), statuses), min_size=1, max_size=4)
small_batches = st.integers(1, 4)

leasing_pops = st.builds(Pop, workers, groups, st.none(), st.integers(2, 4), st.just(1), st.just(False))
any_pops = st.builds(
    Pop, workers, groups, st.none() | partitions, small_batches, st.integers(1, 3), mostly.map(lambda often: not often)
)
acks_of_one = st.builds(
    AckSome,
    workers,
    deliveries,
    st.lists(st.tuples(st.integers(0, 4), st.just("completed")), min_size=1, max_size=1),
    mostly,
    st.booleans(),
)
acks_of_some = st.builds(AckSome, workers, deliveries, some_acks, mostly, st.booleans())
acks_of_all = st.builds(AckAll, workers, deliveries, statuses)
failures = st.builds(AckAll, workers, deliveries, st.just("failed"))
transactions = st.builds(Transaction, workers, items | st.just([]), deliveries, some_acks | st.just([]), mostly)

WEIGHTS = [
    (1, st.just(Nothing())),
    (4, st.builds(Push, workers, items)),
    (6, leasing_pops),
    (3, any_pops),
    (4, acks_of_one),
    (4, acks_of_some),
    (2, acks_of_all),
    (3, failures),
    (3, transactions),
    (2, st.builds(Expire)),
    (1, st.builds(Renew, workers, deliveries)),
    (1, st.builds(Seek, workers, groups, st.sampled_from(["end", "start", "time"]), deliveries)),
]


@st.composite
def steps(draw: st.DrawFn) -> list[Any]:
    """One step, each kind as often as its weight says."""
    return [draw(draw(st.sampled_from([kind for weight, kind in WEIGHTS for _ in range(weight)])))]


@st.composite
def episodes(draw: st.DrawFn) -> list[Any]:
    """A few steps that follow each other: a batch goes out and is acked bit by bit, in some order."""
    worker, group, partition = draw(workers), draw(groups), draw(partitions)
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    acks = st.builds(AckSome, workers, st.just(0), some_acks, mostly, st.booleans())
    return [
        Push(worker, [(partition, number) for number in numbers]),
        Pop(draw(workers), group, draw(st.none() | st.just(partition)), draw(st.integers(2, 5)), 1, False),
        *draw(st.lists(acks_of_one | acks | failures, min_size=1, max_size=3)),
        *draw(st.sampled_from([[], [], [Expire()]])),
    ]


# Long ones: it takes a dozen steps before a lease is late, a failure the last one, or an id forgotten.
histories = st.lists(steps() | episodes(), min_size=20, max_size=40).map(
    lambda several: History(step for some in several for step in some)
)

Message = dict[str, Any]


class Run:
    """One history on a queue of its own."""

    def __init__(self, servers: list[Api], connection: Connection) -> None:
        self.queue = f"queue-{next(NAMES)}"
        self.servers = servers
        self.connection = connection
        self.model = QueueModel()
        self.deliveries: list[tuple[str, list[Message]]] = []

    def at(self, worker: int) -> Api:
        return self.servers[worker % len(self.servers)]

    def delivery(self, back: int) -> tuple[str, list[Message]] | None:
        return self.deliveries[-1 - back] if back < len(self.deliveries) else None

    async def step(self, operation: Any) -> None:
        handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            Nothing: self.nothing,
            Push: self.push,
            Pop: self.pop,
            AckSome: self.ack_some,
            AckAll: self.ack_all,
            Renew: self.renew,
            Expire: self.expire,
            Seek: self.seek,
            Transaction: self.transaction,
        }
        await handlers[type(operation)](operation)

    async def nothing(self, _: Nothing) -> None:
        pass

    async def push(self, push: Push) -> None:
        body = {"items": self._items(push.items)}
        answer = await self.at(push.worker).call("POST", "/api/v1/push", body)
        assert answer.status == 201, answer
        for (partition, number), result in zip(push.items, answer.body, strict=True):
            new = self.model.push(partition, f"t{number}", result["message_id"])
            assert result["status"] == ("queued" if new else "duplicate")

    async def pop(self, pop: Pop) -> None:
        available = {name: self.model.available(name, pop.group) for name in PARTITIONS}
        messages = await self.at(pop.worker).pop(
            self.queue,
            pop.partition,
            batch=pop.batch,
            partitions=pop.partitions,
            autoAck=pop.auto_ack,
            consumerGroup=pop.group,
        )
        self._take(pop.group, messages, pop.auto_ack)
        assert len(messages) <= pop.batch
        served = {message["partition"] for message in messages}
        if pop.partition is not None:
            expected = available[pop.partition][: pop.batch]
            assert [message["transactionId"] for message in messages] == expected
            return
        assert len(served) <= pop.partitions
        assert bool(messages) == any(available.values()), "nothing came although something is there"
        if pop.partitions == 1 and messages:
            assert len(messages) == min(pop.batch, len(available[messages[0]["partition"]]))

    async def ack_some(self, ack: AckSome) -> None:
        found = self.delivery(ack.delivery)
        if found is None:
            return
        group, messages = found
        chosen = [(messages[index % len(messages)], status) for index, status in ack.items]
        if ack.single:
            chosen = chosen[:1]
        await self._ack(self.at(ack.worker), group, chosen, ack.with_lease, ack.single)

    async def ack_all(self, ack: AckAll) -> None:
        found = self.delivery(ack.delivery)
        if found is not None:
            group, messages = found
            chosen = [(message, ack.status) for message in messages]
            await self._ack(self.at(ack.worker), group, chosen, with_lease=True, single=False)

    async def renew(self, renew: Renew) -> None:
        found = self.delivery(renew.delivery)
        if found is None or not found[1][0]["leaseId"]:
            return
        lease = found[1][0]["leaseId"]
        answer = await self.at(renew.worker).call("POST", f"/api/v1/lease/{lease}/extend", {"seconds": 500})
        assert answer.status == (200 if self.model.holds(lease) else 404)

    async def expire(self, _: Expire) -> None:
        await expire_leases(self.connection, self.queue)
        self.model.expire()

    async def seek(self, seek: Seek) -> None:
        found = self.delivery(seek.delivery)
        body: dict[str, Any] = {"toEnd": True}
        until = datetime.max.replace(tzinfo=UTC)
        if seek.where == "start" or (seek.where == "time" and found is None):
            body = {"timestamp": "1970-01-01T00:00:00Z"}
            until = datetime.min.replace(tzinfo=UTC)
        elif seek.where == "time" and found is not None:
            body = {"timestamp": found[1][0]["createdAt"]}
            until = datetime.fromisoformat(found[1][0]["createdAt"])
        # A pop that found nothing has made a cursor too, so which there are is for the database to say.
        committed = await self._stored_until(seek.group, until)
        path = f"/api/v1/consumer-groups/{seek.group}/queues/{self.queue}/seek"
        answer = await self.at(seek.worker).call("POST", path, body)
        assert answer.status == 200, answer
        self.model.seek(seek.group, committed)

    async def transaction(self, transaction: Transaction) -> None:
        found = self.delivery(transaction.delivery)
        acks: list[tuple[Message, str]] = []
        group = GROUPS[0]
        if found is not None:
            group, messages = found
            acks = [(messages[index % len(messages)], status) for index, status in transaction.acks]
        body: list[dict[str, Any]] = [
            {"type": "ack", "consumerGroup": group, "status": status} | naming(message, transaction.with_lease)
            for message, status in acks
        ]
        if transaction.items:
            body.insert(len(body) // 2, {"type": "push", "items": self._items(transaction.items)})
        if not body:
            return
        answer = await self.at(transaction.worker).call("POST", "/api/v1/transaction", {"operations": body})
        assert answer.status == 200, answer
        expected = self._possible(group, acks, transaction)
        assert answer.body["success"] == expected, answer
        if not expected:
            return
        self._apply(group, acks, transaction.with_lease, final=True)
        pushed = [result for result in answer.body["results"] if result["type"] == "push"]
        for (partition, number), result in zip(transaction.items, pushed, strict=True):
            assert self.model.push(partition, f"t{number}", result["messageId"])

    async def check(self) -> None:
        """What is stored is what the model says, and what is left comes out in order."""
        for name in PARTITIONS:
            stored = await stored_messages(self.connection, self.queue, name)
            there = self.model.partitions.get(name)
            assert [message.transaction_id for message in stored] == (there.log if there else [])
            assert {message.transaction_id: message.id for message in stored} == (there.ids if there else {})
        letters = [letter[0] for letter in await dead_letters(self.connection, self.queue)]
        assert sorted(letters) == sorted(transaction_id for _, _, transaction_id in self.model.dead)
        await self.expire(Expire())
        for name in PARTITIONS:
            for group in GROUPS:
                for api in self.servers:
                    pop = Pop(self.servers.index(api), group, name, 1000, 1, True)
                    await self.pop(pop)

    def _items(self, several: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [
            {"queue": self.queue, "partition": partition, "transactionId": f"t{number}", "payload": number}
            for partition, number in several
        ]

    def _take(self, group: str, messages: list[Message], auto_ack: bool) -> None:
        if not messages:
            return
        for message in messages:
            there = self.model.partitions[message["partition"]]
            assert message["id"] == there.ids[message["transactionId"]]
            assert f"t{message['data']}" == message["transactionId"]
        assert bool(messages[0]["leaseId"]) != auto_ack
        assert len({message["leaseId"] for message in messages}) == 1
        for name, several in itertools.groupby(messages, key=lambda message: str(message["partition"])):
            ids = [message["transactionId"] for message in several]
            self.model.popped(name, group, ids, messages[0]["leaseId"] or None)
        self.deliveries.append((group, messages))

    async def _ack(
        self, api: Api, group: str, chosen: list[tuple[Message, str]], with_lease: bool, single: bool
    ) -> None:
        bodies = [naming(message, with_lease) | {"status": status} for message, status in chosen]
        if single:
            answer = await api.call("POST", "/api/v1/ack", bodies[0] | {"consumerGroup": group})
        else:
            answer = await api.call("POST", "/api/v1/ack/batch", {"acknowledgments": bodies, "consumerGroup": group})
        assert answer.status == 200, answer
        outcomes = self._apply(group, chosen, with_lease)
        answered = [Outcome(result["success"], result["error"], result["dlq"]) for result in answer.body]
        assert answered == outcomes

    def _apply(
        self, group: str, chosen: list[tuple[Message, str]], with_lease: bool, final: bool = False
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [Outcome(False)] * len(chosen)
        by_partition: dict[str, list[int]] = {}
        for index, (message, _) in enumerate(chosen):
            by_partition.setdefault(message["partition"], []).append(index)
        for name, indexes in by_partition.items():
            acks = [self._model_ack(*chosen[index], with_lease) for index in indexes]
            for index, outcome in zip(indexes, self.model.ack(name, group, acks, final=final), strict=True):
                outcomes[index] = outcome
        return outcomes

    def _model_ack(self, message: Message, status: str, with_lease: bool) -> Ack:
        offset = self.model.offset(message["partition"], message["transactionId"])
        return Ack(offset, status, message["leaseId"] if with_lease else None)

    def _possible(self, group: str, acks: list[tuple[Message, str]], transaction: Transaction) -> bool:
        """Whether nothing in a transaction stands in its way."""
        for message, status in acks:
            cursor = self.model.cursors.get((message["partition"], group))
            lease = message["leaseId"] if transaction.with_lease else None
            assert cursor is not None
            if status == "retry" and (not lease or (cursor.leased and cursor.lease == lease)):
                return False
            if lease and not (cursor.leased and cursor.lease == lease):
                offset = self.model.offset(message["partition"], message["transactionId"])
                if status != "completed" or cursor.finished != lease or offset >= cursor.committed:
                    return False
            elif status != "completed" and self.model.offset(message["partition"], message["transactionId"]) < (
                cursor.committed
            ):
                return False
        wanted = [(partition, f"t{number}") for partition, number in transaction.items]
        taken = [pair for pair in wanted if pair[0] in self.model.partitions]
        return len(set(wanted)) == len(wanted) and not any(
            id in self.model.partitions[partition].ids for partition, id in taken
        )

    async def _stored_until(self, group: str, time: datetime) -> dict[str, int]:
        """For each partition on which the group has a cursor: the offset after what was stored up to a time."""
        rows = await self.connection.fetch(
            "SELECT p.name, coalesce((SELECT max(s.base_offset + s.count) FROM queen.segments s"
            "  WHERE s.partition_id = p.id AND s.created_at <= $3), 0) AS upto"
            " FROM queen.partitions p JOIN queen.queues q ON q.id = p.queue_id"
            " JOIN queen.cursors c ON c.partition_id = p.id JOIN queen.groups g ON g.id = c.group_id"
            " WHERE q.name = $1 AND g.name = $2",
            self.queue,
            group,
            time,
        )
        return {row["name"]: row["upto"] for row in rows}


def naming(message: Message, with_lease: bool) -> dict[str, Any]:
    names = {"transactionId": message["transactionId"], "partitionId": message["partitionId"]}
    return names | {"leaseId": message["leaseId"]} if with_lease else names


@pytest.fixture
async def servers(start_server: StartServer, topology: str) -> list[Api]:
    """The same servers for all histories of one test. Hosts do not hear of each other, as if no wake-up ever came."""
    if topology == "one worker":
        return [await start_server()]
    if topology == "two hosts":
        return [await start_server(), await start_server()]
    return [await start_server(worker_id=id, num_workers=2) for id in range(2)]


@pytest.mark.timeout(24 * 3600 if SOAK else 900)
@pytest.mark.parametrize("topology", ["one worker", "two workers", "two hosts"])
@settings(
    max_examples=3000 if SOAK else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(history=histories)
async def test_any_history_keeps_every_promise(servers: list[Api], connection: Connection, history: History) -> None:
    run = Run(servers, connection)
    await make_queue(connection, run.queue, retry_limit=RETRY_LIMIT, retry_delay=0)
    for operation in history:
        await run.step(operation)
    await run.check()
