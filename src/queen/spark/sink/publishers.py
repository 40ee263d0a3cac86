"""Publishers of staged rows: directly to the PostgreSQL shards, or through a server."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from queen.client.config import ClientLog, read_config
from queen.client.errors import TRANSIENT, AuthError
from queen.client.http import HttpClient, decode_as
from queen.errors import SettingsError
from queen.log.stage_moves import StageLost
from queen.log.stages import Attempt
from queen.spark.sink.shard_writer import Shard, ShardStager
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


class Publisher(Protocol):
    """Publishes batches: all of one in each place, and once."""

    def begin(self, run: str, batch: int) -> Staging: ...

    def publish(self, run: str, batch: int, parts: Sequence[StagedPart]) -> None: ...

    def abandon(self, run: str, batch: int) -> None: ...


class ShardPublisher:
    """Stages and publishes in every shard that something goes to."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        encryption_keys: Sequence[bytes],
        dedup_window: float,
        outage_grace: float = 0.0,
    ) -> None:
        self.shards = [
            Shard(url, encryption_keys=encryption_keys, dedup_window=dedup_window, outage_grace=outage_grace)
            for url in urls
        ]

    def begin(self, run: str, batch: int) -> ShardStaging:
        return ShardStaging(self.shards, run, batch)

    def publish(self, run: str, batch: int, parts: Sequence[StagedPart]) -> None:
        attempts: dict[int, list[Attempt]] = {}
        for part in parts:
            attempts.setdefault(part.place, []).append(Attempt(part.attempt, part.messages))
        if len(self.shards) > 1:
            for place, own in attempts.items():
                self._check_placement(place, self.shards[place].staged_queues(run, batch, own))
        for place, own in sorted(attempts.items()):
            self.shards[place].publish(run, batch, own)

    def abandon(self, run: str, batch: int) -> None:
        for shard in self.shards:
            shard.abandon(run, batch)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def _check_placement(self, place: int, queues: set[str]) -> None:
        """Before anything is published: a queue that was moved since it was staged for has to be staged for again."""
        missing = queues - self.shards[place].queues_here(queues)
        for number, shard in enumerate(self.shards):
            moved = shard.queues_here(missing) if missing and number != place else set()
            if moved:
                raise StageLost(
                    f"queue {', '.join(sorted(moved))} was moved to shard {number} after the batch was staged;"
                    " nothing was published, write the batch again"
                )


class ShardStaging:
    """Stages what one attempt of a task writes, in as many shards as that concerns.

    Where queues and topics live is looked up for each attempt: they may be moved between two batches.
    """

    def __init__(self, shards: Sequence[Shard], run: str, batch: int) -> None:
        self._shards = shards
        self._key = (run, batch)
        self._stagers: dict[int, ShardStager] = {}
        self._queues: dict[str, int] = {}
        self._topics: dict[TopicKey, int] = {}

    def add(self, items: Sequence[PushItem]) -> None:
        by_place: dict[int, list[PushItem]] = {}
        places = self._places({item.queue for item in items})
        if len(set(places.values())) == 1:
            self._stager(next(iter(places.values()))).add(items)
            return
        for item in items:
            by_place.setdefault(places[item.queue], []).append(item)
        for place, some in by_place.items():
            self._stager(place).add(some)

    def add_topic_items(self, topic: TopicKey, array: bytes, count: int) -> None:
        self._stager(self._place_of_topic(topic)).add_topic_items(array, count)

    def finish(self) -> list[StagedPart]:
        attempts = [(place, stager.finish()) for place, stager in self._stagers.items()]
        return [StagedPart(place, attempt.id, attempt.messages) for place, attempt in attempts]

    def _places(self, queues: set[str]) -> dict[str, int]:
        """The shard on which each queue lives; for a new one, that on which a server would create it."""
        if len(self._shards) == 1:
            return dict.fromkeys(queues, 0)
        unknown = queues - self._queues.keys()
        if unknown:
            for number, shard in enumerate(self._shards):
                self._queues |= dict.fromkeys(shard.queues_here(unknown), number)
            absent = unknown - self._queues.keys()
            if absent:
                layout = self._layout()
                self._queues |= {queue: home(Name.queue(queue), layout) for queue in absent}
        return {queue: self._queues[queue] for queue in queues}

    def _place_of_topic(self, topic: TopicKey) -> int:
        if len(self._shards) == 1:
            return 0
        place = self._topics.get(topic)
        if place is None:
            homes = [number for number, shard in enumerate(self._shards) if shard.has_topic(topic)]
            place = self._topics[topic] = homes[0] if homes else home(Name.topic(*topic), self._layout())
        return place

    def _layout(self) -> Sequence[int]:
        """The shards that take new names."""
        return self._shards[0].layout() or range(len(self._shards))

    def _stager(self, place: int) -> ShardStager:
        stager = self._stagers.get(place)
        if stager is None:
            stager = self._stagers[place] = self._shards[place].stager(*self._key, uuid.uuid4())
        return stager


_PIECE_MESSAGES: Final = 5000
_PIECE_BYTES: Final = 4 << 20
_RETRY_MS: Final = 500
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


class ServerPublisher:
    """Stages and publishes by requests. All of them can be sent again: what was done already is not done twice."""

    def __init__(self, url: str, token: str | None, outage_grace: float = 0.0) -> None:
        """`outage_grace`: for how many seconds it waits for a server that is unavailable."""
        self._loop = asyncio.new_event_loop()
        self._url = url
        self._grace = outage_grace
        options = {"bearer_token": token, "retry_attempts": 1, "retry_delay_millis": _RETRY_MS}
        self._http = HttpClient(read_config(url, options), ClientLog())

    def begin(self, run: str, batch: int) -> ServerStaging:
        return ServerStaging(self, run, batch)

    def publish(self, run: str, batch: int, parts: Sequence[StagedPart]) -> None:
        attempts = [{"attempt": part.attempt, "messages": part.messages, "shard": part.place} for part in parts]
        self.send("/publish", {"run": run, "batch": batch, "attempts": attempts}, _PUBLISH_SECONDS)

    def abandon(self, run: str, batch: int) -> None:
        self.send("/abandon", {"run": run, "batch": batch}, _STAGE_SECONDS)

    def send(self, path: str, body: Any, seconds: float = _STAGE_SECONDS) -> bytes:
        return self._loop.run_until_complete(self._send(path, _encode(body), seconds))

    async def _send(self, path: str, body: bytes, seconds: float) -> bytes:
        deadline: float | None = None
        failures = 0
        while True:
            try:
                return (await self._http.send("POST", f"/api/v1/stages{path}", body, seconds=seconds)).body
            except AuthError as error:
                need = "of the role to write" if error.status == 403 else "that is valid"
                raise SettingsError(
                    f"the server at {self._url} refuses to be written to: {error}. Give a token {need}: option token,"
                    " or --token"
                ) from error
            except TRANSIENT as error:
                failures += 1
                pause = self._http.retry_delay(failures, error)
                deadline = deadline or time.monotonic() + self._grace
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)

    def close(self) -> None:
        self._loop.run_until_complete(self._http.close())
        self._loop.close()


class ServerStaging:
    """Stages what one attempt of a task writes, in pieces."""

    def __init__(self, publisher: ServerPublisher, run: str, batch: int) -> None:
        self._publisher = publisher
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
        answer = self._publisher.send("", {**self._body, "piece": self._piece, **content})
        for place in decode_as(_staged, answer).shards:
            self._staged[place.shard] += place.messages
        self._piece += 1
