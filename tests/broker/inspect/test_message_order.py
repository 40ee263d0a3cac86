"""Messages sorted by time and id are in the order of their partition."""

from __future__ import annotations

import asyncio

from tests.support.api import Api


async def test_messages_that_were_pushed_at_once_are_in_order_by_time_and_id(api: Api) -> None:
    """Small and large requests together: the ids of the large ones are given earlier, while they wait to be stored."""
    await asyncio.gather(*(api.push("in", *range(size)) for size in (3, 60, 200) * 15))
    messages = await api.pop("in", batch=10_000)
    assert len(messages) == 15 * 263
    assert len({message["createdAt"] for message in messages}) < 45, "nothing was stored together"
    assert messages == sorted(messages, key=lambda message: (message["createdAt"], message["id"]))
