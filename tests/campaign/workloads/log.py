"""Producers push numbered messages to partitions, groups pop and ack them; variants that stress one promise."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

import asyncpg

from queen.broker.sharding.fleet import connect_fleet
from queen.broker.sharding.move import Mover
from queen.errors import QueenError as ServerError
from queen.storage.database import UNAVAILABLE_ERRORS
from queen.wire.shards import Name
from tests.campaign.client import Recorder
from tests.campaign.history import Call, Outcome, Violation
from tests.campaign.log_checks import Log, LogChecker, Message, Rules
from tests.campaign.workload import LEASE_SECONDS, Workload
from tests.support.database import Stored, stored_log


def pop_digest(body: Any) -> Any:
    """What the history keeps of the answer of a pop."""
    if not body or not body["messages"]:
        return None
    messages = body["messages"]
    return {"lease": messages[0]["leaseId"], "messages": [[one["partition"], one["transactionId"]] for one in messages]}


def push_digest(body: Any) -> Any:
    return [[one["status"], one.get("message_id")] for one in body]


_MOVE_ERRORS: tuple[type[BaseException], ...] = (ServerError, asyncpg.PostgresError, *UNAVAILABLE_ERRORS)


class LogWorkload(Workload):
    """Nothing is lost, doubled, reordered or skipped."""

    name = "log"
    producers: ClassVar[int] = 2
    groups: ClassVar[Sequence[str]] = ("workers", "audit")
    consumers: ClassVar[int] = 2
    """Of each group."""
    partitions: ClassVar[int] = 3
    options: ClassVar[dict[str, Any]] = {}

    @property
    def queue(self) -> str:
        return f"campaign-{self.name}"

    @property
    def rules(self) -> Rules:
        return Rules(self.name, LEASE_SECONDS)

    async def prepare(self) -> None:
        await self.configure(self.queue, **self.options)

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.produce(number) for number in range(self.producers)]

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.consume(group, number) for group in self.groups for number in range(self.consumers)]

    async def check(self) -> list[Violation]:
        return LogChecker(self.calls(), await self.final_log(), self.rules).check()

    async def final_log(self) -> Log:
        partitions: defaultdict[str, list[Stored]] = defaultdict(list)
        for shard in range(self.site.shape.shards):
            async with self.site.connection(shard) as connection:
                for partition, messages in (await stored_log(connection, self.queue)).items():
                    partitions[partition] += messages
        return Log(
            {
                name: [Message(one.offset, one.id, one.transaction_id) for one in messages]
                for name, messages in partitions.items()
            }
        )

    # Producers.

    async def produce(self, number: int) -> None:
        client = self.client(f"producer{number}", number)
        sent = 0
        while not self.stage.produced.is_set():
            items = self.next_items(number, sent)
            sent += len(items)
            await self.push_until_answered(client, items)
            await self.pause()
        await client.close()

    def next_items(self, producer: int, sent: int) -> list[list[str]]:
        """Partition and transaction id of what is pushed next."""
        count = self.chance.randint(1, 4)
        return [
            [f"p{self.chance.randrange(self.partitions)}", f"{self.name}-{producer}-{sent + number}"]
            for number in range(count)
        ]

    async def push_until_answered(self, client: Recorder, items: list[list[str]]) -> None:
        while not (await self.push(client, items)).ok:
            await self.back_off()

    async def push(self, client: Recorder, items: list[list[str]], **more: Any) -> Call:
        body = {
            "items": [
                {"queue": self.queue, "partition": partition, "transactionId": id, "payload": {"id": id}}
                for partition, id in items
            ]
        } | more
        args = {"items": items, "host": client.url}
        return await client.call("push", args, "POST", "/api/v1/push", body, digest=push_digest)

    # Consumers.

    async def consume(self, group: str, number: int) -> None:
        client = self.client(f"{group}{number}", number)
        idle = self.idle()
        while not idle.long_enough:
            ids: dict[tuple[str, str], str] = {}
            popped = await self.pop(client, group, ids)
            idle.note(popped, popped.answer)
            if not popped.ok:
                await self.back_off()
            elif popped.answer:
                await self.settle(client, group, popped, ids)
        await client.close()

    async def pop(self, client: Recorder, group: str, ids: dict[tuple[str, str], str]) -> Call:
        """A pop; the ids of the partitions are left in `ids`."""

        def digest(body: Any) -> Any:
            for one in body["messages"] if body else ():
                ids[one["partition"], one["transactionId"]] = one["partitionId"]
            return pop_digest(body)

        batch, partitions = self.chance.randint(1, 10), self.chance.randint(1, 3)
        query = {"consumerGroup": group, "batch": batch, "partitions": partitions, "wait": True, "timeout": 700}
        path = f"/api/v1/pop/queue/{self.queue}"
        return await client.call("pop", {"group": group}, "GET", path, query=query, digest=digest)

    async def settle(self, client: Recorder, group: str, popped: Call, ids: dict[tuple[str, str], str]) -> None:
        """Ack everything, as a rule; now and then a part, or nothing."""
        messages = popped.answer["messages"]
        fate = self.chance.random()
        if fate < 0.03:
            return
        if fate < 0.1:
            messages = messages[: self.chance.randint(1, len(messages))]
        for _ in range(3):
            acked = await self.ack(client, group, popped.answer["lease"], messages, ids)
            if acked.ok:
                return
            await self.back_off()

    async def ack(
        self,
        client: Recorder,
        group: str,
        lease: str,
        messages: list[list[str]],
        ids: dict[tuple[str, str], str],
        status: str = "completed",
    ) -> Call:
        body = {
            "consumerGroup": group,
            "acknowledgments": [
                {"transactionId": id, "partitionId": ids[partition, id], "leaseId": lease, "status": status}
                for partition, id in messages
            ],
        }
        args = {"group": group, "lease": lease, "messages": messages, "status": status}

        def digest(answer: Any) -> Any:
            return [[one["success"], one["dlq"]] for one in answer]

        return await client.call("ack", args, "POST", "/api/v1/ack/batch", body, digest=digest)


class DedupWorkload(LogWorkload):
    """Several producers send the same transaction ids: one of each is stored, and every answer names it."""

    name = "dedup"
    producers = 3
    groups = ("workers",)
    consumers = 1
    partitions = 2

    def next_items(self, producer: int, sent: int) -> list[list[str]]:
        # All producers send the same names, at about the same time.
        return [[f"p{number % self.partitions}", f"same-{number}"] for number in range(sent, sent + 3)]

    async def push_until_answered(self, client: Recorder, items: list[list[str]]) -> None:
        await super().push_until_answered(client, items)
        if self.chance.random() < 0.2:
            await self.push(client, items)


class SpoolWorkload(LogWorkload):
    """Pushes that wait on the disk of the host, because they ask for it or because they must."""

    name = "spool"
    groups = ("workers",)

    async def push_until_answered(self, client: Recorder, items: list[list[str]]) -> None:
        more = {"bufferMs": self.chance.randint(10, 500)} if self.chance.random() < 0.3 else {}
        while not (await self.push(client, items, **more)).ok:
            await self.back_off()


class RetentionWorkload(LogWorkload):
    """What every group has consumed is removed soon, and never anything that one of them still needs."""

    name = "retention"
    options: ClassVar[dict[str, Any]] = {"retentionEnabled": True, "completedRetentionSeconds": 1}

    @property
    def rules(self) -> Rules:
        # The window in which an id is known is as short as the retention.
        return Rules(self.name, LEASE_SECONDS, dedup=False)

    async def prepare(self) -> None:
        """Both groups have their cursors before anything can be removed."""
        await super().prepare()
        client = self.client("setup")
        items = [[f"p{number}", f"first-{number}"] for number in range(self.partitions)]
        await self.push_until_answered(client, items)
        for group in self.groups:
            met: set[str] = set()
            while len(met) < self.partitions:
                popped = await self.pop(client, group, {})
                met |= {partition for partition, _ in popped.answer["messages"]} if popped.answer else set()

    async def push_until_answered(self, client: Recorder, items: list[list[str]]) -> None:
        """Each attempt has ids of its own: nobody would know an earlier one by the time the spool is drained."""
        attempt = 0
        while not (await self.push(client, [[name, f"{id}-{attempt}"] for name, id in items])).ok:
            attempt += 1
            await self.back_off()

    async def settle(self, client: Recorder, group: str, popped: Call, ids: dict[tuple[str, str], str]) -> None:
        if group == "audit" and not self.stage.healed.is_set():
            # A group that lags far behind the other.
            await asyncio.sleep(self.chance.uniform(0, 0.8))
        await super().settle(client, group, popped, ids)

    async def final_log(self) -> Log:
        """What was delivered, as most of it is not stored any more: the order in which the slower group saw it."""
        partitions: defaultdict[str, dict[str, None]] = defaultdict(dict)
        pops = [call for call in self.calls("pop") if call.ok and call.answer and call.args["group"] == "audit"]
        for call in sorted(pops, key=lambda call: call.ended):
            for partition, id in call.answer["messages"]:
                partitions[partition].setdefault(id)
        return Log(
            {name: [Message(offset, "", id) for offset, id in enumerate(ids)] for name, ids in partitions.items()}
        )


class MovesWorkload(LogWorkload):
    """The queue goes from shard to shard while it is used."""

    name = "moves"
    shards = 2
    groups = ("workers",)

    @property
    def rules(self) -> Rules:
        # What waits in the spool of the old shard is sent on one by one, behind what is pushed to the new one.
        return Rules(self.name, LEASE_SECONDS, spooled_in_order=False)

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super().writers(), self.move()]

    async def move(self) -> None:
        to = 0
        while not self.stage.produced.is_set():
            await asyncio.sleep(self.chance.uniform(1, 4))
            to = 1 - to
            call = self.history.begin(f"{self.name}/mover", "move", {"to": to})
            try:
                async with asyncio.timeout(30), connect_fleet(self.site.dsns) as fleet:
                    await Mover(fleet).move(Name.queue(self.queue), to)
                self.history.end(call, Outcome.OK)
            except _MOVE_ERRORS as error:
                # PostgreSQL went away: the queue is on one shard or the other, and the next move begins there.
                self.history.end(call, Outcome.UNKNOWN, error=f"{type(error).__name__}: {error}")


class HostsWorkload(LogWorkload):
    """Producers and consumers are spread over two hosts."""

    name = "hosts"
    hosts = 2
    producers = 4
    groups = ("workers",)
    consumers = 4
