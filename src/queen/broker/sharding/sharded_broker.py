"""The brokers of all shards as one: the components of a `Broker` whose requests may concern several shards."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg
import msgspec
from msgspec.structs import replace

from queen.broker.ack.leases import HeldLease, Renewed
from queen.broker.broker import Broker
from queen.broker.pop.requests import Pop, PopRequest, is_empty, unchanged
from queen.broker.sharding.background import InboxForwarder, ShardSetup, SpoolForwarder
from queen.broker.sharding.directory import Directory
from queen.broker.sharding.moves import ShardMoves
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.broker.sharding.shard_router import Scattered, ShardRouter, gather_by_key
from queen.broker.sharding.sharded_topics import ShardedTopics
from queen.errors import QueenError
from queen.log.catalog import Queue
from queen.settings import Settings
from queen.wire.ack import AckItem
from queen.wire.api.messages.messaging import AckResult, PushResult
from queen.wire.ids import lease_partition, partition_number
from queen.wire.push import PushRequest
from queen.wire.shards import Name

log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS: Final = 4
_REFRESH_SECONDS: Final = 2.0
_MOST_PAUSE: Final = 0.25
_LEAST_PAUSE: Final = 0.01

_push_results = msgspec.json.Decoder(list[PushResult])
_ack_results = msgspec.json.Decoder(list[AckResult])


class ShardedBroker:
    """Has the components of a `Broker`; each dispatches its requests to the shards they belong to."""

    def __init__(self, settings: Settings, brokers: Sequence[Broker]) -> None:
        self.settings = settings
        self.brokers = brokers
        self.meter = brokers[0].meter
        self._setup = ShardSetup(settings.database_dsns)
        self.moves = ShardMoves(settings.database_dsns)
        self.directory = Directory([broker.database for broker in brokers], self._look_again)
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
        SpoolForwarder(self.directory, brokers)
        InboxForwarder(self.directory, rules, brokers)
        for broker in brokers:
            broker.siblings = brokers

    def _look_again(self) -> None:
        """After a move: search for messages, since those of a queue that moved back were not announced here."""
        for broker in self.brokers:
            broker.popper.forget_everything()

    async def join(self) -> None:
        """Before any of the brokers is used: give every database its shard number."""
        await self._setup.start()

    async def start(self) -> None:
        await self.directory.start()

    async def stop(self) -> None:
        await self.moves.stop()
        await self._setup.stop()
        await self.directory.stop()


class ShardedCatalog:
    """Cached queues of all shards."""

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

    def push(self, request: PushRequest, render: Callable[[bytes], T]) -> asyncio.Future[T]:
        async def push() -> T:
            return render(await self._push(request))

        return asyncio.ensure_future(push())

    async def _push(self, request: PushRequest) -> bytes:
        items = request.items
        names = {item.queue: Name.queue(item.queue) for item in items}
        find = self._router.directory.find
        shards = {queue: await find(name) for queue, name in names.items()}
        if len(set(shards.values())) == 1:
            try:
                return await self._router.on_shard_of(
                    list(names.values()), lambda shard: self._brokers[shard].pusher.push(request, bytes)
                )
            except Scattered:
                # Nothing was stored: a shard that rejects one queue rejects the whole request.
                return await self._push(request)

        async def push_some(shard: int, indexes: Sequence[int]) -> list[PushResult]:
            some = [items[index] for index in indexes]
            # If one of its queues moves meanwhile, it is split once more.
            nbytes = request.nbytes * len(some) // len(items)
            return _push_results.decode(await self._push(replace(request, items=some, nbytes=nbytes)))

        def failed(index: int, error: QueenError) -> PushResult:
            item = items[index]
            return PushResult("failed", item.queue, index, item.transaction_id, error=str(error))

        results = await gather_by_key([shards[item.queue] for item in items], push_some, failed)
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
            if len(left) == len(items) and len(set(shards)) == 1:
                body = await self._brokers[shards[0]].acker.ack(items, group, bytes, batch=batch)
                results = list(_ack_results.decode(body))
            else:
                body = b""
                found = await self._ack_some(
                    [items[index] for index in left], [shards[index] for index in left], group, batch
                )
                for index, result in zip(left, found, strict=True):
                    results[index] = result
            left = await self._moved(results, partitions, shards)
            if not left:
                return body or self._encoded(results)
        return self._encoded(results)

    async def _ack_some(
        self, items: Sequence[AckItem], shards: Sequence[int], group: str, batch: bool
    ) -> list[AckResult]:
        async def ack(shard: int, indexes: Sequence[int]) -> list[AckResult]:
            some = [items[index] for index in indexes]
            return _ack_results.decode(await self._brokers[shard].acker.ack(some, group, bytes, batch=batch))

        def failed(index: int, error: QueenError) -> AckResult:
            return AckResult(index, items[index].transaction_id, False, str(error), None, None, False, False)

        return await gather_by_key(shards, ack, failed)

    async def _moved(
        self, results: Sequence[AckResult | None], partitions: Sequence[int], shards: list[int]
    ) -> list[int]:
        """Rejected items whose partition is on another shard by now; `shards` is corrected."""
        refused = [index for index, result in enumerate(results) if result is not None and not result.success]
        if not refused:
            return []
        await self._directory.refresh(sorted({shards[index] for index in refused}))
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

    def renew(self, lease_id: str, seconds: float) -> asyncio.Future[Renewed]:
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
        freed, left = 0, [(lease, self._shard_of(lease)) for lease in leases]
        for _ in range(_ATTEMPTS):
            by_shard: dict[int, list[HeldLease]] = {}
            for lease, shard in left:
                by_shard.setdefault(shard, []).append(lease)
            missed = []
            for shard, some in by_shard.items():
                count = await self._brokers[shard].releaser.release(some)
                freed += count
                if count < sum(len(lease.partition_ids) for lease in some):
                    missed.append(shard)
            if not missed:
                break
            # They have ended, or their queue has moved.
            await self._directory.refresh(missed)
            now = [(lease, shard, self._shard_of(lease)) for lease, shard in left]
            left = [(lease, place) for lease, shard, place in now if place != shard]
        return freed

    def _shard_of(self, lease: HeldLease) -> int:
        return self._directory.of_partition(lease.partition_ids[0]) if lease.partition_ids else 0


class ShardedPopper:
    """Pops where a queue lives; a pop that waits goes with its queue when that moves."""

    def __init__(self, router: ShardRouter, brokers: Sequence[Broker]) -> None:
        self._router = router
        self._directory = router.directory
        self._brokers = brokers
        self._tasks: set[asyncio.Task[None]] = set()

    def pop(self, request: PopRequest, render: Callable[[bytes | None], T]) -> asyncio.Future[T]:
        if request.wait:
            answer: asyncio.Future[T] = self.begin(request, render).answer
            return answer
        return asyncio.ensure_future(
            self._router.on_shard_of(
                [Name.queue(request.queues[0])], lambda shard: self._brokers[shard].popper.pop(request, render)
            )
        )

    def begin(self, request: PopRequest, render: Callable[[bytes | None], Any]) -> MovingPop:
        (queue,) = request.queues
        name = Name.queue(queue)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout
        pop = MovingPop(loop.create_future(), render)

        def find() -> Coroutine[Any, Any, int]:
            return self._directory.find(name)

        async def run() -> None:
            while not pop.answer.done():
                shard = await find()
                if pop.answer.done():
                    # Its client left meanwhile: nothing may be leased for it.
                    return
                left = request.waiting(max(0.0, deadline - loop.time())) if request.wait else request
                inner = self._brokers[shard].popper.begin(left, unchanged)
                pop.follow(inner)
                if await self._directory.moves_before(pop.answer, find, shard):
                    pop.withdraw()
                    await asyncio.wait([inner.answer])

        self._spawn(run(), pop.answer)
        pop.answer.add_done_callback(pop.abandon)
        return pop

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
    """A pop that is restarted on another shard when its queue moves."""

    def __init__(self, answer: asyncio.Future[Any], render: Callable[[bytes | None], Any]) -> None:
        self.answer = answer
        self._render = render
        self._inner: Pop | None = None
        self._expired = False
        self._withdrawn = False

    def follow(self, inner: Pop) -> None:
        """Take the answer of a pop on the shard that has the queue now."""
        self._inner, self._withdrawn = inner, False
        inner.answer.add_done_callback(self._answered)
        if self._expired:
            inner.expire()

    def withdraw(self) -> None:
        """Stop waiting on a shard that the queue has left. Messages leased there before are still delivered."""
        self._withdrawn = True
        if self._inner is not None:
            self._inner.expire()

    def expire(self) -> None:
        self._expired = True
        if self._inner is not None:
            self._inner.expire()

    def abandon(self, answer: asyncio.Future[Any]) -> None:
        """Cancel the pop on the shard once this one is answered or cancelled."""
        if self._inner is not None and not self._inner.answer.done():
            self._inner.answer.cancel()

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        if self.answer.done():
            return
        if self._withdrawn and (error is not None or is_empty(answer.result())):
            return
        if error is not None:
            self.answer.set_exception(error)
            return
        try:
            rendered = self._render(answer.result())
        except Exception as failure:
            self.answer.set_exception(failure)
        else:
            self.answer.set_result(rendered)


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

    async def pop(self, namespace: str, task: str, request: PopRequest) -> bytes | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.timeout
        once, pause, read_at = request.at_once(), _LEAST_PAUSE, -math.inf
        heads: list[_Head] = []
        while True:
            if loop.time() - read_at > _REFRESH_SECONDS:
                heads, read_at = await self._heads(namespace, task), loop.time()
            body = await self._first(heads, once)
            left = deadline - loop.time()
            if not is_empty(body) or not request.wait or left <= 0:
                return body
            await asyncio.sleep(min(pause, left))
            pause = min(_MOST_PAUSE, pause * 2)

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

    async def _first(self, heads: Sequence[_Head], request: PopRequest) -> bytes | None:
        """The first batch found; among queues of one priority the shards take turns."""
        self._turn += 1
        empty: bytes | None = None
        for _, level in itertools.groupby(heads, key=lambda head: head.priority):
            some = list(level)
            for place in range(len(some)):
                head = some[(self._turn + place) % len(some)]
                try:
                    body = await self._brokers[head.shard].popper.pop(request.of(head.queues), unchanged)
                except (QueenError, asyncpg.PostgresError) as error:
                    log.debug("pop: shard %d was skipped: %s", head.shard, error)
                    continue
                if not is_empty(body):
                    return body
                empty = body or empty
        return empty
