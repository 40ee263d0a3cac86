"""Where a group starts on a queue: decided at its first pop."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from queen.broker.catalog import QUEUE_MODE
from queen.broker.pop import Pop
from queen.storage.database import Fetcher


class Subscriptions:
    """Records subscriptions; `on_subscribed` is told the group of each new one, and the number of the change."""

    def __init__(self, database: Fetcher, on_subscribed: Callable[[str, int], None], default_mode: str) -> None:
        self._database = database
        self._on_subscribed = on_subscribed
        self._default_mode = default_mode

    async def place(self, queue_name: str, group_id: int, pop: Pop) -> tuple[datetime | None, bool]:
        """Record where the group starts, at its first pop of the queue (or partition).

        Returns the time from which it wants the queue's messages, if any, and whether it has no subscription at all.
        """
        if pop.group == QUEUE_MODE:
            return None, True
        options = pop.options
        mode = options.subscription_mode or self._default_mode
        partition = pop.partition_name or ""
        rows = await self._database.fetch("subscription", group_id, queue_name)
        since = options.subscription_from
        wanted = since is not None or mode in ("new", "new-only", "now")
        if wanted and not any(row["partition_name"] in ("", partition) for row in rows):
            kind = "new" if since is None else "timestamp"
            made = await self._database.fetch("subscribe", group_id, queue_name, partition, kind, since)
            rows = await self._database.fetch("subscription", group_id, queue_name)
            if made:
                self._on_subscribed(pop.group, made[0]["xid"])
        whole = [row["since"] for row in rows if row["partition_name"] == ""]
        return whole[0] if whole else None, not rows
