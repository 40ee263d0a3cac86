"""Group commit: requests that arrive while a statement runs go together in the next one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import asyncpg

from queen.errors import DatabaseUnavailable, Overloaded, QueenError
from queen.metrics.counters import BATCH_SIZES, Histogram

log = logging.getLogger(__name__)


class BatchedRequest(Protocol):
    """A request that waits for its answer."""

    @property
    def answer(self) -> asyncio.Future[Any]: ...


T = TypeVar("T")
RequestT = TypeVar("RequestT", bound=BatchedRequest)


class Backlog(Protocol[T]):
    """The policy of a batcher: what waits, and what of it goes into the next batch of each slot."""

    slots: int
    """How many batches may run at the same time."""

    def add(self, item: T, weight: int) -> int:
        """Queue an item; the slot whose next batch may have it."""
        ...

    def waits(self, slot: int) -> bool:
        """Whether there is anything for a batch of this slot."""
        ...

    def ready(self, slot: int, resume: Callable[[], None]) -> bool:
        """Whether there is, and it may begin now; `resume` is called when one that may not should ask again."""
        ...

    def take(self, slot: int) -> tuple[list[T], int]:
        """The next batch, and its weight."""
        ...

    def done(self, slot: int) -> None:
        """The batch of this slot has ended."""
        ...

    def waiting(self) -> Sequence[T]:
        """Everything that waits."""
        ...

    def __len__(self) -> int: ...


class Batcher(Generic[RequestT]):
    """Runs `run(batch)` for everything submitted.

    There is no timer: an idle batcher starts at once, a busy one gathers. `weigh` is how much of a batch an item takes,
    `limit` how much a batch holds, `most` how much may wait; `backlog` is which items go together and how many batches
    run at once (by default in the order of arrival, one at a time). With a `lock`, a batch is taken and run inside it,
    and what `run` returns is called after its release; while the lock is waited for, `meanwhile` is given what is most
    likely to be the batch.

    `run` answers its items. When PostgreSQL refuses a batch, each item runs alone, so that only the guilty one fails;
    when it is unavailable or too busy, `fail` is called for each.
    """

    def __init__(
        self,
        run: Callable[[list[RequestT]], Awaitable[Callable[[], None] | None]],
        *,
        weigh: Callable[[RequestT], int] = lambda item: 1,
        limit: int = 1000,
        most: int = 100_000,
        backlog: Backlog[RequestT] | None = None,
        lock: AbstractAsyncContextManager[None] | None = None,
        meanwhile: Callable[[Sequence[RequestT]], None] | None = None,
        sizes: Histogram | None = None,
        fail: Callable[[RequestT, Exception], None] | None = None,
    ) -> None:
        self._run = run
        self._fail = fail or fail_request
        self._weigh = weigh
        self._limit = limit
        self._most = most
        self._backlog = backlog if backlog is not None else ArrivalOrder[RequestT](weigh, limit)
        self._lock = lock if lock is not None else nullcontext()
        self._has_lock = False
        self._meanwhile = meanwhile
        self._weight = 0
        self._tasks: list[asyncio.Task[None] | None] = [None] * self._backlog.slots
        self._sizes = sizes if sizes is not None else Histogram.of(BATCH_SIZES)
        self.batches = 0

    def submit(self, item: RequestT) -> None:
        """Have the item run with the next batch. Raises `Overloaded` when too much waits already."""
        weight = self._weigh(item)
        if self._weight + weight > self._most:
            self.check_room(weight)
        self._weight += weight
        slot = self._backlog.add(item, weight)
        if self._tasks[slot] is None:
            self._tasks[slot] = asyncio.get_running_loop().create_task(self._drain(slot))

    def check_room(self, weight: int) -> None:
        """Raises `Overloaded` when too much waits already for an item of this weight."""
        if self._weight and self._weight + weight > self._most:
            raise Overloaded("the server is overloaded: too many requests are queued; nothing was done, try again")

    def __len__(self) -> int:
        return len(self._backlog)

    async def join(self) -> None:
        """Wait until everything submitted so far is answered."""
        while True:
            running = [task for task in self._tasks if task is not None]
            if running:
                await asyncio.wait(running)
            elif len(self._backlog):
                await asyncio.sleep(0.001)
            else:
                return

    async def _drain(self, slot: int) -> None:
        """Run the batches of a slot, one after the other, until nothing is left for it."""
        backlog = self._backlog
        try:
            while backlog.ready(slot, self._start):
                self._has_lock = False
                if self._meanwhile is not None:
                    # When the requests that are on the wire just now have come in, too.
                    asyncio.get_running_loop().call_soon(self._prepare_while_waiting, self._meanwhile)
                async with self._lock:
                    self._has_lock = True
                    batch, weight = backlog.take(slot)
                    self._weight -= weight
                    afterwards = await self._run_batch(batch)
                if afterwards is not None:
                    self._finish(batch, afterwards)
                backlog.done(slot)
                if backlog.slots > 1:
                    self._start()
        finally:
            self._tasks[slot] = None

    def _start(self) -> None:
        for slot, task in enumerate(self._tasks):
            if task is None and self._backlog.waits(slot):
                self._tasks[slot] = asyncio.get_running_loop().create_task(self._drain(slot))

    def _prepare_while_waiting(self, meanwhile: Callable[[Sequence[RequestT]], None]) -> None:
        if not self._has_lock and self._weight <= self._limit:
            meanwhile(self._backlog.waiting())

    async def _run_batch(self, batch: list[RequestT]) -> Callable[[], None] | None:
        self.batches += 1
        self._sizes.observe(len(batch))
        try:
            return await self._run(batch)
        except (QueenError, asyncpg.PostgresError) as error:
            if len(batch) > 1 and not isinstance(error, DatabaseUnavailable | Overloaded):
                await self._run_singly(batch)
            else:
                self._fail_all(batch, error)
        except Exception as error:
            self._log_failure(batch, error)
        return None

    async def _run_singly(self, batch: list[RequestT]) -> None:
        for item in batch:
            if item.answer.done():
                continue
            try:
                afterwards = await self._run([item])
                if afterwards is not None:
                    afterwards()
            except (QueenError, asyncpg.PostgresError) as error:
                self._fail(item, error)
            except Exception as error:
                self._log_failure([item], error)

    def _finish(self, batch: list[RequestT], afterwards: Callable[[], None]) -> None:
        try:
            afterwards()
        except Exception as error:
            self._log_failure(batch, error)

    def _log_failure(self, batch: list[RequestT], error: Exception) -> None:
        """A batcher outlives any one batch; its requests are answered with the error."""
        log.error("batch of %d failed: %s", len(batch), error, exc_info=error)
        self._fail_all(batch, error)

    def _fail_all(self, batch: list[RequestT], error: Exception) -> None:
        for item in batch:
            self._fail(item, error)


def fail_request(request: BatchedRequest, error: Exception) -> None:
    """Answer a request with an error, unless it has been answered."""
    _forget_frames(error)
    if not request.answer.done():
        request.answer.set_exception(error)


def _forget_frames(error: BaseException | None) -> None:
    """Where an error was raised refers to the requests that it is the answer of, with all that they hold."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class ArrivalOrder(Generic[T]):
    """A backlog in the order of arrival, with one batch at a time."""

    slots = 1

    def __init__(self, weigh: Callable[[T], int], limit: int) -> None:
        self._weigh = weigh
        self._limit = limit
        self._items: deque[T] = deque()

    def add(self, item: T, weight: int) -> int:
        self._items.append(item)
        return 0

    def waits(self, slot: int) -> bool:
        return bool(self._items)

    def ready(self, slot: int, resume: Callable[[], None]) -> bool:
        return bool(self._items)

    def take(self, slot: int) -> tuple[list[T], int]:
        items, weight = self._items, 0
        batch: list[T] = []
        while items and weight < self._limit:
            weight += self._weigh(items[0])
            batch.append(items.popleft())
        return batch, weight

    def done(self, slot: int) -> None:
        return

    def waiting(self) -> Sequence[T]:
        return tuple(self._items)

    def __len__(self) -> int:
        return len(self._items)


class SmallFirst(ArrivalOrder[T]):
    """A backlog in which small items pass large ones: those wait for others of their size, and for one at a time.

    Who sends several that have to stay in order sends the next when the one before is answered.
    """

    def __init__(self, weigh: Callable[[T], int], limit: int, small: int) -> None:
        super().__init__(weigh, limit)
        self._small = small
        self._large: deque[T] = deque()

    def add(self, item: T, weight: int) -> int:
        (self._items if weight <= self._small else self._large).append(item)
        return 0

    def waits(self, slot: int) -> bool:
        return bool(self._items or self._large)

    def ready(self, slot: int, resume: Callable[[], None]) -> bool:
        return bool(self._items or self._large)

    def take(self, slot: int) -> tuple[list[T], int]:
        batch, weight = super().take(slot)
        large = self._large
        # Small ones wait for one large one with them, and no more; but that one they do not keep out.
        most = len(batch) + 1 if batch else self._limit
        while large and len(batch) < most:
            weight += self._weigh(large[0])
            batch.append(large.popleft())
            if weight >= self._limit:
                break
        return batch, weight

    def waiting(self) -> Sequence[T]:
        return (*self._items, *self._large)

    def __len__(self) -> int:
        return len(self._items) + len(self._large)
