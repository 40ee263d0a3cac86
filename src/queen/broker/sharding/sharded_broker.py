"""The brokers of all shards as one: the parts of a `Broker` that work on several queues or topics at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg
import msgspec

from queen.broker.ack.leases import HeldLease
from queen.broker.broker import Broker
from queen.broker.pop.requests import Pop, PopOptions
from queen.broker.sharding.directory import Directory
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.broker.sharding.shard_router import Scattered, ShardRouter
from queen.broker.sharding.sharded_topics import ShardedTopics
from queen.broker.sharding.upkeep import Forwarding, Joining
from queen.errors import QueenError
from queen.log.catalog import Queue
from queen.settings import Settings
from queen.wire.ack import AckItem
from queen.wire.api.messaging import AckResult, PushResult
from queen.wire.ids import lease_partition, partition_number
from queen.wire.push import Hold, PushItem
from queen.wire.shards import Name

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

_ATTEMPTS: Final = 4
_REFRESH_SECONDS: Final = 2.0
_LONGEST_NAP: Final = 0.25
_SHORTEST_NAP: Final = 0.01

_push_results = msgspec.json.Decoder(list[PushResult])
_ack_results = msgspec.json.Decoder(list[AckResult])


class ShardedBroker:
    """Has the parts of a `Broker`, and sends what they are given to the shards it belongs to."""

    def __init__(self, settings: Settings, brokers: Sequence[Broker]) -> None:
        self.settings = settings
        self.brokers = brokers
        self.meter = brokers[0].meter
        self._joining = Joining(settings.database_dsns)
        self.directory = Directory([broker.database for broker in brokers])
        rules = NamespaceRules(self.directory, brokers)
        self.router = ShardRouter(self.directory, rules)
        self.pusher = ShardedPusher(self.router, brokers)
        self.popper = ShardedPopper(self.router, brokers)
        self.namespace_pops = ShardedNamespacePops(brokers)
        self.acker = ShardedAcker(self.directory, brokers)
        self.renewer = ShardedRenewer(self.router, brokers)
        self.releaser = ShardedReleaser(self.directory, brokers)
        self.catalog = ShardedCatalog(self.directory, brokers)
        self.topics = ShardedTopics(self.router, rules, brokers)
        Forwarding(self.directory, rules, brokers)
        for broker in brokers:
            broker.siblings = brokers

    async def join(self) -> None:
        """Before any of the brokers is used: have every database be its shard."""
        await self._joining.start()

    async def start(self) -> None:
        await self.directory.start()

    async def stop(self) -> None:
        await self._joining.stop()
        await self.directory.stop()


class ShardedCatalog:
    """What is known of queues."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers

    def cached_queue(self, name: str) -> Queue | None:
        shard = self._directory.known(Name.queue(name))
        return self._brokers[shard].catalog.cached_queue(name) if shard is not None else None


class ShardedPusher:
    """Stores messages where their queues live; what goes to one shard is stored as a whole."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._router = router
        self._brokers = brokers

    def push(
        self,
        items: list[PushItem],
        nbytes: int,
        render: Callable[[bytes], T],
        subject: str | None = None,
        hold: Hold | None = None,
    ) -> asyncio.Future[T]:
        async def push() -> T:
            return render(await self._push(items, nbytes, subject, hold))

        return asyncio.ensure_future(push())

    async def _push(self, items: list[PushItem], nbytes: int, subject: str | None, hold: Hold | None) -> bytes:
        names = {item.queue: Name.queue(item.queue) for item in items}
        find = self._router.directory.find
        shards = {queue: await find(name) for queue, name in names.items()}
        if len(set(shards.values())) == 1:
            try:
                return await self._router.on_shard_of(
                    list(names.values()),
                    lambda shard: self._brokers[shard].pusher.push(items, nbytes, bytes, subject, hold),
                )
            except Scattered:
                # Nothing was stored: a shard that refuses one queue refuses all that came with it.
                return await self._push(items, nbytes, subject, hold)

        groups = grouped([shards[item.queue] for item in items])

        async def push_some(indexes: Sequence[int]) -> list[PushResult]:
            some = [items[index] for index in indexes]
            # Should one of its queues move meanwhile, it is split once more.
            return _push_results.decode(await self._push(some, nbytes * len(some) // len(items), subject, hold))

        def failed(index: int, error: QueenError) -> PushResult:
            item = items[index]
            return PushResult("failed", item.queue, index, item.transaction_id, error=str(error))

        results = await gather_in_order(groups, push_some, failed)
        for index, result in enumerate(results):
            result.index = index
        return msgspec.json.encode(results)


class ShardedAcker:
    """Applies acknowledgments on the shards of their partitions."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers

    def ack(self, items: list[AckItem], group: str, render: Callable[[bytes], T], *, batch: bool) -> asyncio.Future[T]:
        async def ack() -> T:
            return render(await self._ack(items, group, batch=batch))

        return asyncio.ensure_future(ack())

    async def _ack(self, items: list[AckItem], group: str, *, batch: bool) -> bytes:
        partitions = [partition_number(item.partition_id) for item in items]
        shards = [self._directory.of_partition(partition) for partition in partitions]
        results: list[AckResult | None] = [None] * len(items)
        left = list(range(len(items)))
        for _ in range(_ATTEMPTS):
            groups = [[left[place] for place in group] for group in grouped([shards[index] for index in left])]
            if len(groups) == 1 and len(left) == len(items):
                body = await self._brokers[shards[0]].acker.ack(items, group, bytes, batch=batch)
                results = list(_ack_results.decode(body))
            else:
                body = b""
                await self._ack_groups(items, group, groups, shards, results, batch=batch)
            left = await self._moved(results, partitions, shards)
            if not left:
                return body or self._encoded(results)
        return self._encoded(results)

    async def _ack_groups(
        self,
        items: list[AckItem],
        group: str,
        groups: Sequence[Sequence[int]],
        shards: Sequence[int],
        results: list[AckResult | None],
        *,
        batch: bool,
    ) -> None:
        async def ack_some(indexes: Sequence[int]) -> list[AckResult]:
            acker = self._brokers[shards[indexes[0]]].acker
            return _ack_results.decode(await acker.ack([items[index] for index in indexes], group, bytes, batch=batch))

        def failed(index: int, error: QueenError) -> AckResult:
            return AckResult(index, items[index].transaction_id, False, str(error), None, None, False, False)

        order = [index for indexes in groups for index in indexes]
        numbered = grouped([place for place, indexes in enumerate(groups) for _ in indexes])
        found = await gather_in_order(
            numbered,
            lambda places: ack_some([order[place] for place in places]),
            lambda place, error: failed(order[place], error),
        )
        for index, result in zip(order, found, strict=True):
            results[index] = result

    async def _moved(
        self, results: Sequence[AckResult | None], partitions: Sequence[int], shards: list[int]
    ) -> list[int]:
        """Which of those that were refused are on another shard by now; `shards` is corrected."""
        refused = [index for index, result in enumerate(results) if result is not None and not result.success]
        if not refused:
            return []
        await self._directory.look(sorted({shards[index] for index in refused}))
        moved = []
        for index in refused:
            shard = self._directory.of_partition(partitions[index])
            if shard != shards[index]:
                shards[index] = shard
                moved.append(index)
        return moved

    def _encoded(self, results: Sequence[AckResult | None]) -> bytes:
        for index, result in enumerate(results):
            if result is not None:
                result.index = index
        return msgspec.json.encode(results)


class ShardedRenewer:
    """Renews leases on the shards of their partitions."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._router = router
        self._brokers = brokers

    def renew(self, lease_id: str, seconds: float) -> asyncio.Future[datetime]:
        return asyncio.ensure_future(
            self._router.on_shard_of_partition(
                lease_partition(lease_id), lambda shard: self._brokers[shard].renewer.renew(lease_id, seconds)
            )
        )


class ShardedReleaser:
    """Releases leases on the shards of their partitions."""

    def __init__(self, directory: Directory, brokers: Sequence[Broker]) -> None:
        self._directory = directory
        self._brokers = brokers

    def release(self, leases: Sequence[HeldLease]) -> asyncio.Future[int]:
        return asyncio.ensure_future(self._release(leases))

    async def _release(self, leases: Sequence[HeldLease]) -> int:
        by_shard: dict[int, list[HeldLease]] = {}
        for lease in leases:
            shard = self._directory.of_partition(lease.partition_ids[0]) if lease.partition_ids else 0
            by_shard.setdefault(shard, []).append(lease)
        return sum([await self._brokers[shard].releaser.release(some) for shard, some in by_shard.items()])


class ShardedPopper:
    """Pops where a queue lives; a pop that waits goes with its queue when that moves."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._router = router
        self._directory = router.directory
        self._brokers = brokers
        self._tasks: set[asyncio.Task[None]] = set()

    def pop(
        self,
        queue_names: tuple[str, ...],
        partition_name: str | None,
        group: str,
        options: PopOptions,
        render: Callable[[bytes | None], T],
    ) -> asyncio.Future[T]:
        if options.wait:
            answer: asyncio.Future[T] = self.begin(queue_names, partition_name, group, options, render).answer
            return answer
        return asyncio.ensure_future(
            self._router.on_shard_of(
                [Name.queue(queue_names[0])],
                lambda shard: self._brokers[shard].popper.pop(queue_names, partition_name, group, options, render),
            )
        )

    def begin(
        self,
        queue_names: tuple[str, ...],
        partition_name: str | None,
        group: str,
        options: PopOptions,
        render: Callable[[bytes | None], Any],
    ) -> MovingPop:
        (queue,) = queue_names
        name = Name.queue(queue)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + options.timeout
        pop = MovingPop(loop.create_future())

        async def run() -> None:
            while not pop.answer.done():
                shard = await self._directory.find(name)
                left = options.waiting(max(0.0, deadline - loop.time())) if options.wait else options
                pop.follow(self._brokers[shard].popper.begin(queue_names, partition_name, group, left, render))
                await self._until_moved(pop, name, shard)

        self._spawn(run(), pop.answer)
        pop.answer.add_done_callback(pop.abandon)
        return pop

    async def _until_moved(self, pop: MovingPop, name: Name, shard: int) -> None:
        """Until the pop is answered, or the queue has moved to another shard."""
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


class MovingPop:
    """A pop that may be begun again on another shard."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self.answer = answer
        self._inner: Pop | None = None
        self._expired = False

    def follow(self, inner: Pop) -> None:
        before, self._inner = self._inner, inner
        if before is not None:
            # What it may have claimed is released.
            before.answer.cancel()
        inner.answer.add_done_callback(self._answered)
        if self._expired:
            inner.expire()

    def expire(self) -> None:
        self._expired = True
        if self._inner is not None:
            self._inner.expire()

    def abandon(self, answer: asyncio.Future[Any]) -> None:
        """Cancel the pop on the shard once this one is answered or cancelled."""
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


class _Head(NamedTuple):
    """Queues of one priority (as a number that sorts the highest first) on one shard."""

    priority: int
    shard: int
    queues: tuple[str, ...]


class ShardedNamespacePops:
    """Pops from the queues of a namespace or task, wherever they live; those of higher priority first."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._brokers = brokers
        self._turn = 0

    async def pop(self, namespace: str, task: str, group: str, options: PopOptions) -> bytes | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + options.timeout
        once, nap, read_at = dataclasses.replace(options, wait=False), _SHORTEST_NAP, -math.inf
        heads: list[_Head] = []
        while True:
            if loop.time() - read_at > _REFRESH_SECONDS:
                heads, read_at = await self._heads(namespace, task), loop.time()
            body = await self._first(heads, group, once)
            left = deadline - loop.time()
            if body is not None or not options.wait or left <= 0:
                return body
            await asyncio.sleep(min(nap, left))
            nap = min(_LONGEST_NAP, nap * 2)

    async def _heads(self, namespace: str, task: str) -> list[_Head]:
        """The queues of each shard and priority, the highest first. Raises when every shard is unavailable."""
        found: dict[tuple[int, int], list[str]] = {}
        failures: list[QueenError] = []
        for shard, broker in enumerate(self._brokers):
            try:
                queues = await broker.catalog.all_queues()
            except QueenError as error:
                failures.append(error)
                continue
            for queue in queues:
                if (not namespace or queue.namespace == namespace) and (not task or queue.task == task):
                    found.setdefault((-queue.priority, shard), []).append(queue.name)
        if len(failures) == len(self._brokers):
            raise failures[0]
        return sorted(_Head(priority, shard, tuple(names)) for (priority, shard), names in found.items())

    async def _first(self, heads: Sequence[_Head], group: str, options: PopOptions) -> bytes | None:
        """The first batch there is; among queues of one priority another shard begins each time."""
        self._turn += 1
        for _, level in itertools.groupby(heads, key=lambda head: head.priority):
            some = list(level)
            for place in range(len(some)):
                head = some[(self._turn + place) % len(some)]
                try:
                    body = await self._brokers[head.shard].popper.pop(head.queues, None, group, options, _unchanged)
                except (QueenError, asyncpg.PostgresError) as error:
                    log.debug("shard %d is left out of a pop: %s", head.shard, error)
                    continue
                if body is not None:
                    return body
        return None


def _unchanged(body: bytes | None) -> bytes | None:
    return body


def grouped(keys: Sequence[K]) -> list[list[int]]:
    """The positions of equal keys."""
    groups: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


async def gather_in_order(
    groups: Sequence[Sequence[int]],
    ask: Callable[[Sequence[int]], Awaitable[Sequence[R]]],
    failed: Callable[[int, QueenError], R],
) -> list[R]:
    """The result of each position. An error becomes a result where other groups were served, else it is raised."""
    answers = await asyncio.gather(*(ask(indexes) for indexes in groups), return_exceptions=True)
    served = any(not isinstance(answer, BaseException) for answer in answers)
    results: dict[int, R] = {}
    for indexes, answer in zip(groups, answers, strict=True):
        if not isinstance(answer, BaseException):
            results |= zip(indexes, answer, strict=True)
        elif isinstance(answer, QueenError) and served:
            results |= {index: failed(index, answer) for index in indexes}
        else:
            raise answer
    return [results[index] for index in range(len(results))]
