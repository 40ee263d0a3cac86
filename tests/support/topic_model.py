"""What a topic promises, in memory: items in their order of service, leases, retries, keys and dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

MAX_RETRIES = 1


@dataclass
class Item:
    """`owner`: who leases it, or did until the lease lapsed."""

    id: int
    priority: int
    due: datetime
    retries: int = 0
    leased: bool = False
    owner: str | None = None

    @property
    def place(self) -> tuple[int, datetime, int]:
        return self.priority, self.due, self.id


class TopicModel:
    """One topic with `MAX_RETRIES` and no backoff."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self.dead: dict[int, Item] = {}
        self.keys: dict[str, int] = {}

    def enqueued(self, id: int, priority: int, due: datetime, key: str | None) -> None:
        """An item was answered with an id; `due` is when it is stored for."""
        if key is not None and key in self.keys:
            assert self.keys[key] == id, "a duplicate names another item"
            return
        assert id not in self.items and id not in self.dead, "an id was given twice"
        self.items[id] = Item(id, priority, due)
        if key is not None:
            self.keys[key] = id

    def next(self, now: datetime, limit: int) -> list[Item]:
        """What a dequeue is to be given, in order."""
        ready = [item for item in self.items.values() if not item.leased and item.due <= now]
        return sorted(ready, key=lambda item: item.place)[:limit]

    def lease(self, items: list[Item], owner: str) -> None:
        for item in items:
            item.leased, item.owner = True, owner

    def held(self, id: int, owner: str | None) -> Item | None:
        """The item that an ack or a nack means, if it counts."""
        item = self.items.get(id)
        return item if item and item.owner and owner in (None, item.owner) else None

    def ack(self, id: int, owner: str | None) -> bool:
        return self.held(id, owner) is not None and bool(self.items.pop(id))

    def nack(self, id: int, owner: str | None) -> str | None:
        """`ready`, `dead`, or None when it does not count."""
        item = self.held(id, owner)
        if item is None:
            return None
        item.owner = None
        return self._fail(item)

    def expire(self) -> None:
        for item in list(self.items.values()):
            if item.leased:
                self._fail(item)

    def retry_dead(self, id: int) -> bool:
        item = self.dead.pop(id, None)
        if item is not None:
            self.items[id] = Item(id, item.priority, item.due)
        return item is not None

    def purge(self) -> int:
        count = len(self.items)
        self.keys = {key: id for key, id in self.keys.items() if id not in self.items}
        self.items.clear()
        return count

    def _fail(self, item: Item) -> str:
        item.leased = False
        if item.retries >= MAX_RETRIES:
            self.dead[item.id] = self.items.pop(item.id)
            return "dead"
        item.retries += 1
        return "ready"
