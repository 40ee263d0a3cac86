"""Writing to the shards themselves: each queue and topic on the one where it lives."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from queen.spark.outlets import StagedPart, TopicKey
from queen.spark.publish import Attempt, Shard, ShardStager
from queen.wire.push import PushItem
from queen.wire.shards import Name, home


class ShardOutlet:
    """Stages and publishes in every shard that something goes to."""

    def __init__(self, urls: Sequence[str], *, encryption_keys: Sequence[bytes], dedup_window: float) -> None:
        self._shards = [Shard(url, encryption_keys=encryption_keys, dedup_window=dedup_window) for url in urls]
        self._queues: dict[str, int] = {}
        self._topics: dict[TopicKey, int] = {}

    def begin(self, run: str, batch: int) -> ShardStaging:
        return ShardStaging(self, run, batch)

    def stager(self, place: int, run: str, batch: int) -> ShardStager:
        return self._shards[place].stager(run, batch, uuid.uuid4())

    def publish(self, run: str, batch: int, parts: Sequence[StagedPart]) -> None:
        for place in sorted({part.place for part in parts}):
            attempts = [Attempt(part.attempt, part.messages) for part in parts if part.place == place]
            self._shards[place].publish(run, batch, attempts)

    def abandon(self, run: str, batch: int) -> None:
        for shard in self._shards:
            shard.abandon(run, batch)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def place_of_queue(self, queue: str) -> int:
        """The shard on which a queue lives; for a new one, that on which a server would make it."""
        if len(self._shards) == 1:
            return 0
        place = self._queues.get(queue)
        if place is None:
            homes = [number for number, shard in enumerate(self._shards) if shard.holds_queue(queue)]
            place = self._queues[queue] = homes[0] if homes else home(Name.queue(queue), self._layout())
        return place

    def place_of_topic(self, topic: TopicKey) -> int:
        if len(self._shards) == 1:
            return 0
        place = self._topics.get(topic)
        if place is None:
            homes = [number for number, shard in enumerate(self._shards) if shard.holds_topic(topic)]
            place = self._topics[topic] = homes[0] if homes else home(Name.topic(*topic), self._layout())
        return place

    def _layout(self) -> Sequence[int]:
        """The shards that take new names."""
        return self._shards[0].layout() or range(len(self._shards))


class ShardStaging:
    """Stages what one attempt of a task writes, in as many shards as that concerns."""

    def __init__(self, outlet: ShardOutlet, run: str, batch: int) -> None:
        self._outlet = outlet
        self._key = (run, batch)
        self._stagers: dict[int, ShardStager] = {}

    def add(self, items: Sequence[PushItem]) -> None:
        by_place: dict[int, list[PushItem]] = {}
        place_of = self._outlet.place_of_queue
        places = {queue: place_of(queue) for queue in {item.queue for item in items}}
        if len(set(places.values())) == 1:
            self._stager(next(iter(places.values()))).add(items)
            return
        for item in items:
            by_place.setdefault(places[item.queue], []).append(item)
        for place, some in by_place.items():
            self._stager(place).add(some)

    def add_topic_items(self, topic: TopicKey, array: bytes, count: int) -> None:
        self._stager(self._outlet.place_of_topic(topic)).add_topic_items(array, count)

    def finish(self) -> list[StagedPart]:
        attempts = [(place, stager.finish()) for place, stager in self._stagers.items()]
        return [StagedPart(place, attempt.id, attempt.messages) for place, attempt in attempts]

    def _stager(self, place: int) -> ShardStager:
        stager = self._stagers.get(place)
        if stager is None:
            stager = self._stagers[place] = self._outlet.stager(place, *self._key)
        return stager
