"""Ids of leases and partitions with a bit flipped: nothing is acked, renewed or read by them."""

from __future__ import annotations

import uuid
from typing import Any

from tests.support.api import Api, payloads

BITS = range(128)


def flipped(text: str, bit: int) -> str:
    return str(uuid.UUID(int=uuid.UUID(text).int ^ (1 << bit)))


async def test_an_ack_with_a_flipped_lease_or_partition_changes_nothing(api: Api) -> None:
    for partition in ("a", "b"):
        await api.push("q", 1, 2, partition=partition, ids=["t1", "t2"])
    held = [*await api.pop("q", "a", batch=2), *await api.pop("q", "b", batch=2)]
    first = held[0]
    acks: list[dict[str, Any]] = []
    for bit in BITS:
        acks.append(first | {"leaseId": flipped(first["leaseId"], bit)})
        acks.append(first | {"partitionId": flipped(first["partitionId"], bit)})
    for ack in acks:
        (result,) = await api.ack([ack])
        assert not result["success"], ack
    assert [result["success"] for result in await api.ack(held)] == [True] * 4
    assert await api.pop("q", batch=9, partitions=9) == []


async def test_a_flipped_lease_is_not_renewed(api: Api) -> None:
    await api.push("q", 1)
    (message,) = await api.pop("q")
    for bit in BITS:
        answer = await api.call("POST", f"/api/v1/lease/{flipped(message['leaseId'], bit)}/extend", {"seconds": 60})
        assert answer.status == 404, answer
    assert (await api.call("POST", f"/api/v1/lease/{message['leaseId']}/extend", {"seconds": 60})).status == 200


async def test_a_flipped_partition_shows_no_message_of_another(api: Api) -> None:
    (pushed,) = await api.push("q", "secret", ids=["t1"])
    for bit in BITS:
        answer = await api.call("GET", f"/api/v1/messages/{flipped(pushed['partition_id'], bit)}/t1")
        assert answer.status == 404, answer
    assert payloads(await api.pop("q")) == ["secret"]
