"""A queue of many partitions is shown page by page, by name, with the totals of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.api import Api


@pytest.mark.parametrize("path", ["/api/v1/resources/queues/q", "/api/v1/status/queues/q"])
async def test_partitions_come_page_by_page_with_the_totals_of_the_queue(api: Api, path: str) -> None:
    for number in range(7):
        await api.push("q", *range(number + 1), partition=f"p{number}")
    messages = await api.pop("q", partition="p6", batch=3, consumerGroup="g")
    await api.ack(messages, ["completed", "completed", "dlq"], group="g")
    await api.pop("q", partition="p5", batch=2, consumerGroup="g")
    whole = (await api.call("GET", path)).body
    assert whole["next"] is None
    assert len(whole["partitions"]) == 7
    seen: list[dict[str, Any]] = []
    after = ""
    while True:
        page = (await api.call("GET", path, limit=3, after=after)).body
        assert page["totals"] == whole["totals"]
        seen += page["partitions"]
        after = page["next"]
        if after is None:
            break
        assert after == page["partitions"][-1]["name"]
    assert seen == whole["partitions"]
    assert whole["totals"]["deadLetter"] == 1


async def test_a_queue_is_shown_without_its_partitions(api: Api) -> None:
    for number in range(3):
        await api.push("q", number, partition=f"p{number}")
    answer = (await api.call("GET", "/api/v1/status/queues/q", includePartitions="false")).body
    assert answer["partitions"] == []
    assert answer["next"] is None
    assert answer["totals"]["total"] == 3
