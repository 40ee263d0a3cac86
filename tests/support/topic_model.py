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
    """One topic without backoff."""

    def __init__(self) -> None:
        self.max_retries = MAX_RETRIES
        self.at_most_once = False
        self.paused = False
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
        if self.paused:
            return []
        return self.first(now, limit)

    def first(self, now: datetime, limit: int) -> list[Item]:
        """What is ready and due, in the order of service."""
        ready = [item for item in self.items.values() if not item.leased and item.due <= now]
        return sorted(ready, key=lambda item: item.place)[:limit]

    def lease(self, items: list[Item], owner: str) -> None:
        for item in items:
            item.leased, item.owner = True, owner
            if self.at_most_once:
                del self.items[item.id]

    def held(self, id: int, owner: str | None) -> Item | None:
        """The item that an ack or a nack means, if it counts."""
        item = self.items.get(id)
        return item if item and item.owner and owner in (None, item.owner) else None

    def ack(self, id: int, owner: str | None) -> bool:
        return self.held(id, owner) is not None and bool(self.items.pop(id))

    def nack(self, id: int, owner: str | None, *, for_good: bool = False) -> str | None:
        """`ready`, `dead`, or None when it does not count."""
        item = self.held(id, owner)
        if item is None:
            return None
        item.owner = None
        return self._fail(item, for_good=for_good)

    def leased(self, id: int, owner: str | None) -> Item | None:
        """The item whose live lease a release or an extension means."""
        item = self.held(id, owner)
        return item if item and item.leased else None

    def release(self, id: int, owner: str | None) -> bool:
        item = self.leased(id, owner)
        if item is not None:
            item.leased, item.owner = False, None
        return item is not None

    def expire(self) -> None:
        for item in list(self.items.values()):
            if item.leased:
                self._fail(item)

    def retry_dead(self, id: int) -> bool:
        item = self.dead.pop(id, None)
        if item is not None:
            self.items[id] = Item(id, item.priority, item.due)
        return item is not None

    def purge(self, *, leased: bool = True) -> int:
        gone = {item.id for item in self.items.values() if leased or not item.leased}
        self.keys = {key: id for key, id in self.keys.items() if id not in gone}
        self.items = {id: item for id, item in self.items.items() if id not in gone}
        return len(gone)

    def counts(self, now: datetime) -> dict[str, int]:
        ready = [item for item in self.items.values() if not item.leased]
        delayed = sum(item.due > now for item in ready)
        leased = len(self.items) - len(ready)
        return {"ready": len(ready) - delayed, "delayed": delayed, "leased": leased, "dead": len(self.dead)}

    def _fail(self, item: Item, *, for_good: bool = False) -> str:
        item.leased = False
        if for_good or item.retries >= self.max_retries:
            self.dead[item.id] = self.items.pop(item.id)
            return "dead"
        item.retries += 1
        return "ready"
