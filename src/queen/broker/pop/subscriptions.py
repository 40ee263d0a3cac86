"""Subscriptions: where a consumer group starts on a queue that it meets for the first time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from queen.broker.pop.requests import Pop
from queen.log.catalog import QUEUE_MODE
from queen.storage.database import Fetcher


class Subscriptions:
    """Records subscriptions; `on_subscribed` gets the group of each new one, and the number of the change."""

    def __init__(self, database: Fetcher, on_subscribed: Callable[[str, int], None], default_mode: str) -> None:
        self._database = database
        self._on_subscribed = on_subscribed
        self._default_mode = default_mode

    def are_wanted(self, pop: Pop) -> bool:
        """Whether a group that meets a queue does not begin with its oldest message."""
        mode = pop.request.subscription_mode or self._default_mode
        return pop.request.subscription_from is not None or mode in ("new", "new-only", "now")

    async def place(self, queue_name: str, group_id: int, pop: Pop) -> tuple[datetime | None, bool, bool]:
        """Record where the group starts, at its first pop of the queue (or partition).

        Returns the time from which it gets the queue's messages, if any, whether it has no subscription at all, and
        whether it gets only the newest message of a partition.
        """
        request = pop.request
        if request.group == QUEUE_MODE:
            return None, True, False
        partition = request.partition or ""
        rows = await self._database.fetch("subscription", group_id, queue_name)
        since = request.subscription_from
        if request.conflation and not any(row["partition_name"] == "" for row in rows):
            mode = ("new" if since is None else "timestamp") if self.are_wanted(pop) else "all"
            made = await self._database.fetch("declare_conflation", group_id, queue_name, mode, since)
            rows = await self._database.fetch("subscription", group_id, queue_name)
            if made:
                self._on_subscribed(request.group, made[0]["xid"])
        if self.are_wanted(pop) and not any(row["partition_name"] in ("", partition) for row in rows):
            kind = "new" if since is None else "timestamp"
            made = await self._database.fetch("subscribe", group_id, queue_name, partition, kind, since)
            rows = await self._database.fetch("subscription", group_id, queue_name)
            if made:
                self._on_subscribed(request.group, made[0]["xid"])
        whole = next((row for row in rows if row["partition_name"] == ""), None)
        if whole is None:
            return None, not rows, False
        return whole["since"], False, whole["conflation"]
