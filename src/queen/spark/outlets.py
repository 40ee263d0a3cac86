"""Where rows are staged and published: in the PostgreSQL shards, or through a server."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from queen.wire.push import PushItem

TopicKey: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StagedPart:
    """What an attempt of a task staged in one place: a shard, or a server."""

    place: int
    attempt: uuid.UUID
    messages: int


class Staging(Protocol):
    """Stages what one attempt of a task writes."""

    def add(self, items: Sequence[PushItem]) -> None: ...

    def add_topic_items(self, topic: TopicKey, array: bytes, count: int) -> None:
        """Items of one topic: a JSON array of them, known to be good."""

    def finish(self) -> list[StagedPart]: ...


class Outlet(Protocol):
    """Publishes batches: all of one in each place, and once."""

    def begin(self, run: str, batch: int) -> Staging: ...

    def publish(self, run: str, batch: int, parts: Sequence[StagedPart]) -> None: ...

    def abandon(self, run: str, batch: int) -> None: ...
