"""Messages are taken from one queue and turned into two others, in transactions: all of each or nothing."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any

from tests.campaign.client import Recorder
from tests.campaign.history import Call, Violation
from tests.campaign.transaction_checks import Transactions, check_transactions
from tests.campaign.workloads.log import LogWorkload
from tests.support.database import stored_log

_SINKS = ("left", "right")


class TransactionsWorkload(LogWorkload):
    """Every message that comes in goes out once to each side, and no transaction is seen by halves."""

    name = "transactions"
    groups = ("movers",)
    consumers = 3
    one_shard = True

    def sink(self, side: str) -> str:
        return f"{self.queue}-{side}"

    async def prepare(self) -> None:
        await super().prepare()
        for side in _SINKS:
            await self.configure(self.sink(side))

    def writers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super().writers(), *(self.pair(number) for number in range(2))]

    async def settle(self, client: Recorder, group: str, popped: Call, ids: dict[tuple[str, str], str]) -> None:
        """Message by message: its ack and what becomes of it are one transaction."""
        for partition, id in popped.answer["messages"]:
            name = uuid.uuid4().hex
            ack = {"type": "ack", "transactionId": id, "partitionId": ids[partition, id]}
            ack |= {"leaseId": popped.answer["lease"], "consumerGroup": group, "status": "completed"}
            call = await self.transact(client, name, [ack], {"of": [partition, id], "group": group})
            if not call.ok or not call.answer["success"]:
                return

    async def pair(self, number: int) -> None:
        """Transactions that only push, to both sides: their order is the same on each."""
        client = self.client(f"pair{number}")
        while not self.stage.produced.is_set():
            await self.transact(client, uuid.uuid4().hex, [], {"of": None})
            await self.pause()
        await client.close()

    async def transact(self, client: Recorder, name: str, first: list[Any], args: dict[str, Any]) -> Call:
        items = [{"queue": self.sink(side), "transactionId": name, "payload": args["of"]} for side in _SINKS]
        if self.chance.random() < 0.5:
            items.reverse()
        pushes = [{"type": "push", "items": [item]} for item in items]

        def digest(body: Any) -> Any:
            return {"success": body["success"], "error": body.get("error")}

        body = {"operations": [*first, *pushes]}
        return await client.call("transact", {"name": name} | args, "POST", "/api/v1/transaction", body, digest=digest)

    async def check(self) -> list[Violation]:
        source = await self.final_log()
        sides: defaultdict[str, list[str]] = defaultdict(list)
        for shard in range(self.site.shape.shards):
            async with self.site.connection(shard) as connection:
                for side in _SINKS:
                    for messages in (await stored_log(connection, self.sink(side))).values():
                        sides[side] += [one.transaction_id for one in messages]
        names = {(name, one.transaction_id) for name, messages in source.partitions.items() for one in messages}
        return check_transactions(self.name, self.calls("transact"), Transactions(names, dict(sides)))
