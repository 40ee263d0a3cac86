"""Running calls on the shard of a name or partition, and again on another one if it has moved meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import asyncpg

from queen.broker.sharding.directory import Directory
from queen.broker.sharding.namespace_rules import NamespaceRules
from queen.errors import BadRequest, Conflict, DatabaseUnavailable, NotFound, Overloaded, QueenError, QuotaExceeded
from queen.storage.shard_setup import BEING_LAID_OUT, ELSEWHERE
from queen.wire.shards import Name

log = logging.getLogger(__name__)

R = TypeVar("R")
K = TypeVar("K", bound=Hashable)

_ATTEMPTS: Final = 8
_LAYOUT_SECONDS: Final = 0.1


class Scattered(Overloaded):
    """Names of one request have moved to different shards."""


class ShardRouter:
    """Finds shards and runs calls on them."""

    def __init__(self, directory: Directory, rules: NamespaceRules) -> None:
        self.directory = directory
        self.rules = rules

    async def on_shard_of(self, names: Sequence[Name], ask: Callable[[int], Awaitable[R]]) -> R:
        """Run on the shard that has all the names; if one has moved meanwhile, on its new shard."""
        return await self.placed(lambda: self._shard_of(names), ask)

    async def on_shard_of_partition(self, partition_id: int, ask: Callable[[int], Awaitable[R]]) -> R:
        """Run on the shard that a partition lives on."""

        async def find() -> int:
            return self.directory.of_partition(partition_id)

        return await self.placed(find, ask)

    async def placed(self, find: Callable[[], Awaitable[int]], ask: Callable[[int], Awaitable[R]]) -> R:
        """Run on the shard that `find` gives; if it rejects the call, again where `find` then points."""
        for attempt in range(_ATTEMPTS):
            shard = await find()
            try:
                result = await ask(shard)
            except (asyncpg.PostgresError, QueenError) as error:
                if attempt < _ATTEMPTS - 1 and await self._should_retry(error, shard, find):
                    continue
                if isinstance(error, asyncpg.PostgresError) and error.sqlstate in (ELSEWHERE, BEING_LAID_OUT):
                    raise Overloaded(f"{error}; try again soon") from error
                raise
            if not is_refusal(result) or not await self._has_moved(shard, find):
                return result
        raise Overloaded("what the request names is being moved to another shard; try again soon")

    async def on_available_shards(self, ask: Callable[[int], Awaitable[R]]) -> list[R]:
        """Run on all shards; unavailable ones are skipped, unless all are."""
        answers = await asyncio.gather(*map(ask, range(self.directory.count)), return_exceptions=True)
        results = [answer for answer in answers if not isinstance(answer, BaseException)]
        for shard, answer in enumerate(answers):
            if not isinstance(answer, BaseException):
                continue
            # A bad request is bad on every shard.
            if not results or not is_outage(answer):
                raise answer
            log.warning("shard %d was skipped: %s", shard, answer)
        return results

    async def on_every_shard(self, ask: Callable[[int], Awaitable[R]]) -> list[R]:
        """Run on all shards, none of which may fail."""
        return await asyncio.gather(*map(ask, range(self.directory.count)))

    async def one_shard(self, names: Sequence[Name], partitions: Sequence[int], what: str) -> int:
        """The shard on which everything is. Raises `BadRequest` that says what is where when it is on several."""
        places: dict[int, str] = {}
        for name in names:
            places.setdefault(await self.directory.find(name), str(name))
        for partition in partitions:
            if partition:
                places.setdefault(self.directory.of_partition(partition), "an acknowledged message")
        if len(places) > 1:
            where = " and ".join(f"{one} on shard {shard}" for shard, one in sorted(places.items()))
            raise BadRequest(
                f"{what} spans shards: {where}. Nothing was done: everything it names has to live on one shard"
                " (`queen shards list` shows what is where, `queen shards move` moves queues and topics)"
            )
        return next(iter(places), self.directory.layout[0])

    async def _shard_of(self, names: Sequence[Name]) -> int:
        shard = await self.directory.find(names[0])
        for name in names[1:]:
            if await self.directory.find(name) != shard:
                raise Scattered(f"{name} has been moved to another shard; try again soon")
        return shard

    async def _should_retry(self, error: Exception, shard: int, find: Callable[[], Awaitable[int]]) -> bool:
        if isinstance(error, BadRequest | Overloaded | DatabaseUnavailable):
            return False
        if isinstance(error, asyncpg.PostgresError) and error.sqlstate == BEING_LAID_OUT:
            await asyncio.sleep(_LAYOUT_SECONDS)
            await self.directory.refresh()
            return True
        return await self._has_moved(shard, find)

    async def _has_moved(self, shard: int, find: Callable[[], Awaitable[int]]) -> bool:
        await self.directory.refresh([shard])
        return await find() != shard


def is_refusal(result: Any) -> bool:
    """Whether a result means that something was not found."""
    return getattr(result, "success", True) is False or getattr(result, "status", None) in (404, 409)


def is_outage(error: BaseException) -> bool:
    """Whether a shard failed, rather than the request being wrong."""
    return isinstance(error, QueenError) and not isinstance(error, BadRequest | NotFound | Conflict | QuotaExceeded)


async def gather_by_key(
    keys: Sequence[K],
    ask: Callable[[K, list[int]], Awaitable[Sequence[R]]],
    failed: Callable[[int, QueenError], R] | None = None,
) -> list[R]:
    """The result of each position; positions of equal keys are asked for together.

    The error of one group becomes the result of `failed` where another group succeeded, else it is raised.
    """
    groups: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    answers = await asyncio.gather(*(ask(key, indexes) for key, indexes in groups.items()), return_exceptions=True)
    succeeded = any(not isinstance(answer, BaseException) for answer in answers)
    results: dict[int, R] = {}
    for indexes, answer in zip(groups.values(), answers, strict=True):
        if not isinstance(answer, BaseException):
            results |= zip(indexes, answer, strict=True)
        elif isinstance(answer, QueenError) and succeeded and failed is not None:
            results |= {index: failed(index, answer) for index in indexes}
        else:
            raise answer
    return [results[index] for index in range(len(keys))]
