"""A namespace of Celery's or Kombu's queues, as a test sees it from outside."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from kombu import Connection

from queen import QueenSync, TopicCounts


class Namespace:
    """A namespace on a server: its URL for Celery, and its topics."""

    def __init__(self, port: int, name: str) -> None:
        self.name = name
        self.url = f"queen://127.0.0.1:{port}/{name}"
        self.queen = QueenSync(f"http://127.0.0.1:{port}")

    def connect(self, **options: Any) -> Connection:
        """A Kombu connection; options are those of the transport."""
        return Connection(self.url, transport_options=options)

    def counts(self, queue: str) -> TopicCounts:
        counts = self.queen.topic(self.name, queue).counts()
        assert counts is not None, f"{queue} has never had a message"
        return counts

    def leased(self, queue: str) -> list[Any]:
        return list(self.queen.topic(self.name, queue).peek(100, leased=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.queen.close()
