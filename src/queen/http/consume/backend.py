"""What consumers on WebSockets need of a broker, or of several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar

from queen.broker.ack.leases import HeldLease
from queen.broker.catalog import Queue
from queen.broker.pop.requests import PopOptions
from queen.settings import Settings
from queen.wire.ack import AckItem

T = TypeVar("T")


class PendingPop(Protocol):
    """A request for messages that may be waiting."""

    @property
    def answer(self) -> asyncio.Future[Any]: ...

    def expire(self) -> None: ...


class Popping(Protocol):
    def begin(
        self,
        queue_names: tuple[str, ...],
        partition_name: str | None,
        group: str,
        options: PopOptions,
        render: Callable[[bytes | None], Any],
    ) -> PendingPop: ...


class Acking(Protocol):
    def ack(
        self, items: list[AckItem], group: str, render: Callable[[bytes], T], *, batch: bool
    ) -> asyncio.Future[T]: ...


class Renewing(Protocol):
    def renew(self, lease_id: str, seconds: float) -> asyncio.Future[datetime]: ...


class Releasing(Protocol):
    def release(self, leases: Sequence[HeldLease]) -> asyncio.Future[int]: ...


class KnowingQueues(Protocol):
    def cached_queue(self, name: str) -> Queue | None: ...


class Backend(Protocol):
    """Where messages come from and acknowledgments go."""

    @property
    def settings(self) -> Settings: ...

    @property
    def popper(self) -> Popping: ...

    @property
    def acker(self) -> Acking: ...

    @property
    def renewer(self) -> Renewing: ...

    @property
    def releaser(self) -> Releasing: ...

    @property
    def catalog(self) -> KnowingQueues: ...
