"""WebSocket consumers in front of several shards: the parts of a broker they use, over all brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from queen.broker.ack.leases import HeldLease
from queen.broker.broker import Broker
from queen.broker.catalog import Queue
from queen.broker.pop.requests import PopOptions
from queen.broker.sharding.directory import Directory
from queen.errors import NotFound
from queen.http.consume.backend import PendingPop
from queen.http.placement.batches import partition_number
from queen.settings import Settings
from queen.wire.ack import AckItem
from queen.wire.ids import is_uuid, parse_lease
from queen.wire.shards import Name

T = TypeVar("T")

_ATTEMPTS: Final = 4


class ManyShards:
    """Serves consumers from the shards that their queues are on. It is each of its parts itself."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def settings(self) -> Settings:
        return self._brokers[0].settings

    @property
    def popper(self) -> ManyShards:
        return self

    @property
    def acker(self) -> ManyShards:
        return self

    @property
    def renewer(self) -> ManyShards:
        return self

    @property
    def releaser(self) -> ManyShards:
        return self

    @property
    def catalog(self) -> ManyShards:
        return self

    def cached_queue(self, name: str) -> Queue | None:
        shard = self._directory.known(Name.queue(name))
        return self._brokers[shard].catalog.cached_queue(name) if shard is not None else None

    def begin(
        self,
        queue_names: tuple[str, ...],
        partition_name: str | None,
        group: str,
        options: PopOptions,
        render: Callable[[bytes | None], Any],
    ) -> PendingPop:
        """Wait for messages of a queue where it lives, and go with it when it moves."""
        (queue,) = queue_names
        pop = _MovingPop(asyncio.get_running_loop().create_future())

        async def run() -> None:
            while not pop.answer.done():
                shard = await self._directory.find(Name.queue(queue))
                pop.wait_with(self._brokers[shard].popper.begin(queue_names, partition_name, group, options, render))
                await self._while_there(pop, Name.queue(queue), shard)

        self._spawn(run(), pop.answer)
        pop.answer.add_done_callback(pop.give_up)
        return pop

    def ack(self, items: list[AckItem], group: str, render: Callable[[bytes], T], *, batch: bool) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            results: list[dict[str, Any]] = [{}] * len(items)
            shards = [self._shard_of(item) for item in items]
            left = list(range(len(items)))
            for _ in range(_ATTEMPTS):
                for shard in sorted({shards[index] for index in left}):
                    some = [index for index in left if shards[index] == shard]
                    body = await self._brokers[shard].acker.ack(
                        [items[index] for index in some], group, bytes, batch=batch
                    )
                    if len(some) == len(items) and b'"success":false' not in body:
                        _set(answer, render(body))
                        return
                    for index, result in zip(some, msgspec.json.decode(body), strict=True):
                        results[index] = result | {"index": index}
                refused = [index for index in left if not results[index]["success"]]
                if refused:
                    await self._directory.look(sorted({shards[index] for index in refused}))
                now = {index: self._shard_of(items[index]) for index in refused}
                left = [index for index in refused if now[index] != shards[index]]
                for index in left:
                    shards[index] = now[index]
                if not left:
                    break
            _set(answer, render(msgspec.json.encode(results)))

        self._spawn(run(), answer)
        return answer

    def renew(self, lease_id: str, seconds: float) -> asyncio.Future[datetime]:
        answer: asyncio.Future[datetime] = asyncio.get_running_loop().create_future()
        place = parse_lease(lease_id) if is_uuid(lease_id) else None
        partition = place[0] if place is not None else 0

        async def run() -> None:
            for _ in range(_ATTEMPTS):
                shard = self._directory.of_partition(partition)
                try:
                    _set(answer, await self._brokers[shard].renewer.renew(lease_id, seconds))
                    return
                except NotFound:
                    await self._directory.look([shard])
                    if self._directory.of_partition(partition) == shard:
                        raise
            raise NotFound("Lease not found")

        self._spawn(run(), answer)
        return answer

    def release(self, leases: Sequence[HeldLease]) -> asyncio.Future[int]:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            by_shard: dict[int, list[HeldLease]] = {}
            for lease in leases:
                shard = self._directory.of_partition(lease.partition_ids[0]) if lease.partition_ids else 0
                by_shard.setdefault(shard, []).append(lease)
            released = [await self._brokers[shard].releaser.release(some) for shard, some in by_shard.items()]
            _set(answer, sum(released))

        self._spawn(run(), answer)
        return answer

    def _shard_of(self, item: AckItem) -> int:
        return self._directory.of_partition(partition_number(item.partition_id))

    async def _while_there(self, pop: _MovingPop, name: Name, shard: int) -> None:
        """Until the pop is answered, or the queue has gone to another shard."""
        while not pop.answer.done():
            moved = asyncio.ensure_future(self._directory.changed().wait())
            try:
                await asyncio.wait({pop.answer, moved}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                moved.cancel()
            if not pop.answer.done() and await self._directory.find(name) != shard:
                return

    def _spawn(self, work: Coroutine[Any, Any, None], answer: asyncio.Future[Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = task.exception() if not task.cancelled() else None
            if error is not None and not answer.done():
                answer.set_exception(error)

        task.add_done_callback(ended)


class _MovingPop:
    """A pop that may be begun again elsewhere."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self.answer = answer
        self._inner: PendingPop | None = None
        self._expired = False

    def wait_with(self, inner: PendingPop) -> None:
        before, self._inner = self._inner, inner
        if before is not None:
            # What it may have claimed goes back.
            before.answer.cancel()
        inner.answer.add_done_callback(self._answered)
        if self._expired:
            inner.expire()

    def expire(self) -> None:
        self._expired = True
        if self._inner is not None:
            self._inner.expire()

    def give_up(self, answer: asyncio.Future[Any]) -> None:
        """Nobody waits any more."""
        if self._inner is not None and not self._inner.answer.done():
            self._inner.answer.cancel()

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled() or self.answer.done():
            return
        error = answer.exception()
        if error is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(answer.result())


def _set(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)
