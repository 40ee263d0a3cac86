"""Writing through a server, where its databases are out of reach."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from queen.client.config import read_config
from queen.client.http import HttpClient, decode_as
from queen.client.log import ClientLog
from queen.spark.outlets import StagedPart, TopicKey
from queen.wire.push import PushItem

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
