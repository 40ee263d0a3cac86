"""Items with priorities, delays and keys are enqueued, leased, and acked or not; in both write modes."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

from tests.campaign.client import Recorder
from tests.campaign.history import Call, Violation
from tests.campaign.topic_checks import TopicChecker, TopicRules, TopicState
from tests.campaign.workload import LEASE_SECONDS, Workload

_IDS = (
    "SELECT i.id FROM queen.{} i JOIN queen.topics t ON t.id = i.topic_id"
    " JOIN queen.topic_namespaces n ON n.id = t.namespace_id WHERE n.name = $1"
)


class TopicsWorkload(Workload):
    """A topic in a namespace that commits before it answers."""

    name = "topics"
    namespace: ClassVar[str] = "campaign"
    keyed: ClassVar[bool] = True
    producers: ClassVar[int] = 2
    consumers: ClassVar[int] = 3

    @property
    def where(self) -> dict[str, str]:
        return {"namespace": self.namespace, "topic": "jobs"}

    async def prepare(self) -> None:
        options = {"max_retries": 1000, "backoff_base_ms": 50, "backoff_cap_ms": 300}
        body = {**self.where, "options": options}
        await self.persist(self.client("setup"), "setup", "POST", "/api/v1/topics/configure", body)

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.produce(number) for number in range(self.producers)]

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.consume(number) for number in range(self.consumers)]

    async def produce(self, number: int) -> None:
        client = self.client(f"producer{number}", number)
        sent = 0
        while not self.stage.produced.is_set():
            items = []
            for _ in range(self.chance.randint(1, 4)):
                delay = round(self.chance.uniform(0.1, 2), 2) if self.chance.random() < 0.2 else 0
                items.append([f"{number}-{sent}", self.chance.randint(0, 3), delay, self.keyed])
                sent += 1
            while not (await self.enqueue(client, items)).ok:
                await self.back_off()
            await self.pause()
        await client.close()

    async def enqueue(self, client: Recorder, items: list[list[Any]]) -> Call:
        body = [
            {**self.where, "data": name, "priority": priority}
            | ({"delay": delay} if delay else {})
            | ({"idempotency_key": name} if keyed else {})
            for name, priority, delay, keyed in items
        ]
        return await client.call("enqueue", {"items": items}, "POST", "/api/v1/topics/enqueue", body)

    async def consume(self, number: int) -> None:
        client = self.client(f"consumer{number}", number)
        idle = self.idle()
        while not idle.long_enough:
            query = {**self.where, "limit": self.chance.randint(1, 6), "wait": True, "timeout": 700}
            query["lease"] = LEASE_SECONDS
            taken = await client.call(
                "dequeue", {}, "GET", "/api/v1/topics/dequeue", query=query, digest=_dequeue_digest
            )
            idle.note(taken, taken.answer)
            if not taken.ok:
                await self.back_off()
            elif taken.answer:
                await self.settle(client, taken)
        await client.close()

    async def settle(self, client: Recorder, taken: Call) -> None:
        owner = taken.answer["owner"]
        ids = [id for id, _, _ in taken.answer["items"]]
        fate = self.chance.random()
        if fate < 0.03:
            return
        failed = ids[: self.chance.randint(1, len(ids))] if fate < 0.12 else []
        if failed:
            await self.finish(client, "nack", owner, failed)
        done = [id for id in ids if id not in failed]
        for _ in range(3):
            if not done or (await self.finish(client, "ack", owner, done)).ok:
                return
            await self.back_off()

    async def finish(self, client: Recorder, how: str, owner: str, ids: list[int]) -> Call:
        body = [{**self.where, "id": id, "lease_owner": owner} for id in ids]

        def digest(answer: Any) -> Any:
            return [one["success"] for one in answer]

        return await client.call(
            how, {"owner": owner, "ids": ids}, "POST", f"/api/v1/topics/{how}", body, digest=digest
        )

    async def check(self) -> list[Violation]:
        found: dict[str, set[int]] = {"topic_items": set(), "topic_dead_letters": set()}
        for shard in range(self.site.shape.shards):
            async with self.site.connection(shard) as connection:
                for table, ids in found.items():
                    ids.update(row["id"] for row in await connection.fetch(_IDS.format(table), self.namespace))
        rules = TopicRules(self.name, LEASE_SECONDS, strict=self.keyed)
        return TopicChecker(self.calls(), TopicState(*found.values()), rules).check()


class BufferedWorkload(TopicsWorkload):
    """A namespace that answers when an item is in the log of the host."""

    name = "buffered"
    namespace = "buffered"
    keyed = False


def _dequeue_digest(body: Any) -> Any:
    if not body:
        return None
    return {"owner": body[0]["lease_owner"], "items": [[one["id"], one["data"], one["priority"]] for one in body]}
