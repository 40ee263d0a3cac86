"""Consumer groups, one of which is sought back again and again: each reads on from exactly where it was put."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.campaign.client import Recorder
from tests.campaign.history import Call
from tests.campaign.log_checks import Rules
from tests.campaign.workload import LEASE_SECONDS
from tests.campaign.workloads.log import LogWorkload


class GroupsWorkload(LogWorkload):
    """The group `sought` is moved to offsets that it has already been given."""

    name = "groups"
    groups = ("steady", "sought")
    consumers = 1

    @property
    def rules(self) -> Rules:
        return Rules(self.name, LEASE_SECONDS, releases=True)

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super().writers(), self.seek()]

    async def seek(self) -> None:
        client = self.client("seeker")
        while not self.stage.produced.is_set():
            await asyncio.sleep(self.chance.uniform(0.5, 2.5))
            given = Counter(partition for call in self.calls("push") if call.ok for partition, _ in call.args["items"])
            if given:
                await self._seek_once(client, given)
        await client.close()

    async def _seek_once(self, client: Recorder, given: Counter[str]) -> Call:
        group = "sought"
        if self.chance.random() < 0.3:
            path = f"/api/v1/consumer-groups/{group}/queues/{self.queue}/seek"
            args: dict[str, Any] = {"group": group, "partition": None, "offset": 0}
            return await client.call("seek", args, "POST", path, {"toBeginning": True})
        partition = self.chance.choice(sorted(given))
        # Not beyond what was acked for sure, so that nothing is skipped: clamped to the log it could be anything.
        offset = self.chance.randint(0, self._acked(group, partition))
        path = f"/api/v1/consumer-groups/{group}/queues/{self.queue}/partitions/{partition}/seek"
        args = {"group": group, "partition": partition, "offset": offset}
        return await client.call("seek", args, "POST", path, {"offset": offset})

    def _acked(self, group: str, partition: str) -> int:
        """So many messages of a partition at least are behind the group."""
        ids = {
            id
            for call in self.calls("ack")
            if call.ok and call.args["group"] == group
            for (one, id), (success, _) in zip(call.args["messages"], call.answer, strict=True)
            if one == partition and success
        }
        return len(ids)
