"""Where rows are staged and published: in the PostgreSQL shards, or through a server."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from queen.client.config import ClientLog, read_config
from queen.client.http import HttpClient, decode_as
from queen.spark.publish import Attempt, Shard, ShardStager
from queen.wire.push import PushItem
from queen.wire.shards import Name, home

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


_PIECE_MESSAGES: Final = 5000
_PIECE_BYTES: Final = 4 << 20
_ATTEMPTS: Final = 6
# A large batch is published by one request.
_PUBLISH_SECONDS: Final = 600.0
_STAGE_SECONDS: Final = 60.0


class _Place(msgspec.Struct):
    shard: int
    messages: int


class _Staged(msgspec.Struct):
    shards: list[_Place]


_encode = msgspec.json.encode
_staged = msgspec.json.Decoder(_Staged)


class ServerOutlet:
    """Stages and publishes by requests. All of them can be sent again: what was done already is not done twice."""

    def __init__(self, url: str, token: str | None) -> None:
        self._loop = asyncio.new_event_loop()
        config = read_config(url, {"bearer_token": token, "retry_attempts": _ATTEMPTS})
        self._http = HttpClient(config, ClientLog())

    def begin(self, run: str, batch: int) -> ServerStaging:
        return ServerStaging(self, run, batch)

    def publish(self, run: str, batch: int, parts: Sequence[StagedPart]) -> None:
        attempts = [{"attempt": part.attempt, "messages": part.messages, "shard": part.place} for part in parts]
        self.send("/publish", {"run": run, "batch": batch, "attempts": attempts}, _PUBLISH_SECONDS)

    def abandon(self, run: str, batch: int) -> None:
        self.send("/abandon", {"run": run, "batch": batch}, _STAGE_SECONDS)

    def send(self, path: str, body: Any, seconds: float = _STAGE_SECONDS) -> bytes:
        sending = self._http.send("POST", f"/api/v1/stages{path}", _encode(body), seconds=seconds)
        return self._loop.run_until_complete(sending).body

    def close(self) -> None:
        self._loop.run_until_complete(self._http.close())
        self._loop.close()


class ServerStaging:
    """Stages what one attempt of a task writes, in pieces."""

    def __init__(self, outlet: ServerOutlet, run: str, batch: int) -> None:
        self._outlet = outlet
        self._attempt = uuid.uuid4()
        self._body: dict[str, Any] = {"run": run, "batch": batch, "attempt": self._attempt}
        self._piece = 0
        self._staged: Counter[int] = Counter()
        self._waiting: list[PushItem] = []
        self._waiting_bytes = 0

    def add(self, items: Sequence[PushItem]) -> None:
        for item in items:
            self._waiting.append(item)
            self._waiting_bytes += memoryview(item.payload).nbytes + 100
            if len(self._waiting) == _PIECE_MESSAGES or self._waiting_bytes >= _PIECE_BYTES:
                self._send_waiting()

    def add_topic_items(self, topic: TopicKey, array: bytes, count: int) -> None:
        self._send({"topicItems": msgspec.Raw(array)})

    def finish(self) -> list[StagedPart]:
        self._send_waiting()
        return [StagedPart(shard, self._attempt, count) for shard, count in sorted(self._staged.items())]

    def _send_waiting(self) -> None:
        if self._waiting:
            self._send({"items": self._waiting})
        self._waiting, self._waiting_bytes = [], 0

    def _send(self, content: dict[str, Any]) -> None:
        answer = self._outlet.send("", {**self._body, "piece": self._piece, **content})
        for place in decode_as(_staged, answer).shards:
            self._staged[place.shard] += place.messages
        self._piece += 1
