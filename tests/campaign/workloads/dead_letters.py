"""Messages that always fail become dead letters, and are redriven: each is in one place, always."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar

from tests.campaign.client import Recorder
from tests.campaign.dead_letter_checks import DeadLetters, check_dead_letters
from tests.campaign.history import Call, Violation
from tests.campaign.workloads.log import LogWorkload
from tests.support.database import dead_letters

POISON = "bad"


class DeadLettersWorkload(LogWorkload):
    """Some messages fail until they are dead; a copy that was redriven succeeds."""

    name = "dead-letters"
    groups = ("workers",)
    options: ClassVar[dict[str, Any]] = {"retryLimit": 1, "retryDelay": 0}

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super().writers(), self.redrive()]

    def next_items(self, producer: int, sent: int) -> list[list[str]]:
        items = super().next_items(producer, sent)
        return [[partition, f"{id}-{POISON}" if self.chance.random() < 0.15 else id] for partition, id in items]

    async def settle(self, client: Recorder, group: str, popped: Call, ids: dict[tuple[str, str], str]) -> None:
        """What comes before a message that fails is done; what comes after it is given again."""
        lease = popped.answer["lease"]
        by_partition: dict[str, list[list[str]]] = {}
        for partition, id in popped.answer["messages"]:
            by_partition.setdefault(partition, []).append([partition, id])
        for messages in by_partition.values():
            bad = next((place for place, (_, id) in enumerate(messages) if id.endswith(POISON)), len(messages))
            if bad and not (await self.ack(client, group, lease, messages[:bad], ids)).ok:
                continue
            if bad < len(messages):
                await self.ack(client, group, lease, messages[bad : bad + 1], ids, status="failed")

    async def redrive(self) -> None:
        client = self.client("redriver")
        while not self.stage.produced.is_set():
            await client.call("redrive", {}, "POST", "/api/v1/dlq/retry", {"queue": self.queue, "limit": 3})
            await self.pause()
            await self.back_off()
        await client.close()

    async def check(self) -> list[Violation]:
        log = await self.final_log()
        dead: list[str] = []
        for shard in range(self.site.shape.shards):
            async with self.site.connection(shard) as connection:
                dead += [id for id, _, _ in await dead_letters(connection, self.queue)]
        stored = [message.transaction_id for messages in log.partitions.values() for message in messages]
        return check_dead_letters(self.name, self.calls(), DeadLetters(stored, dead))
