"""Calling a route of one shard or of all of them, again where something has moved meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import asyncpg

from queen.broker.sharding.directory import Directory
from queen.errors import Overloaded, QueenError
from queen.http.server.errors import status_for
from queen.http.server.message import HttpError, Request, Response
from queen.http.server.router import Handler
from queen.storage.shard_setup import BEING_LAID_OUT, ELSEWHERE
from queen.wire.shards import Name

log = logging.getLogger(__name__)

Handlers: TypeAlias = Sequence[Handler]
"""One route, as each shard serves it."""
T = TypeVar("T")

_ATTEMPTS: Final = 8
_LAYOUT_SECONDS: Final = 0.1
_REFUSED: Final = b'"success":false'


class Apart(Overloaded):
    """Things that were on one shard are not any more."""


class Calls:
    """Calls routes of shards."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory

    async def by_name(self, handlers: Handlers, request: Request, name: Name) -> Response:
        """Ask the shard that a queue or topic lives on."""

        async def ask(shard: int) -> Response:
            return await call(handlers[shard], request)

        return await self.on_shard_of([name], ask)

    async def on_shard_of(self, names: Sequence[Name], ask: Callable[[int], Awaitable[Response]]) -> Response:
        """Ask the one shard on which all the names live; when it no longer knows one of them, where it is now."""
        return await self.placed(lambda: self._shard_of(names), ask)

    async def by_partition(self, handlers: Handlers, request: Request, partition_id: int) -> Response:
        """Ask the shard that a partition lives on."""

        async def find() -> int:
            return self.directory.of_partition(partition_id)

        return await self.placed(find, lambda shard: call(handlers[shard], request))

    async def placed(self, find: Callable[[], Awaitable[int]], ask: Callable[[int], Awaitable[Response]]) -> Response:
        """Ask the shard that is found; should it refuse, look whether another is found by now."""
        for attempt in range(_ATTEMPTS):
            shard = await find()
            try:
                response = await ask(shard)
            except (HttpError, asyncpg.PostgresError, QueenError) as error:
                if await self._should_try_again(error, shard, find, attempt):
                    continue
                if isinstance(error, asyncpg.PostgresError) and error.sqlstate in (ELSEWHERE, BEING_LAID_OUT):
                    raise Overloaded(f"{error}; try again soon") from error
                raise
            if not _is_refusal(response) or not await self._found_elsewhere(shard, find):
                return response
        raise Overloaded("what the request is about is being moved to another shard; try again soon")

    async def everywhere(self, handlers: Handlers, request: Request) -> list[Response]:
        """Ask all shards; those that cannot be reached are left out, unless it is all of them."""
        answers = await asyncio.gather(*(call(handler, request) for handler in handlers), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        responses = [answer for answer in answers if isinstance(answer, Response)]
        for failure in failures:
            # What is wrong with the request is wrong with it everywhere.
            if not responses or not isinstance(failure, QueenError) or status_for(failure) < 500:
                raise failure
            log.warning("a shard is left out of an answer: %s", failure)
        return responses

    async def everyone(self, handlers: Handlers, request: Request) -> list[Response]:
        """Ask all shards, none of which may fail."""
        return await asyncio.gather(*(call(handler, request) for handler in handlers))

    async def _shard_of(self, names: Sequence[Name]) -> int:
        shard = await self.directory.find(names[0])
        for name in names[1:]:
            if await self.directory.find(name) != shard:
                raise Apart(f"{name} has been moved to another shard; try again soon")
        return shard

    async def _should_try_again(
        self, error: Exception, shard: int, find: Callable[[], Awaitable[int]], attempt: int
    ) -> bool:
        if attempt == _ATTEMPTS - 1:
            return False
        state = error.sqlstate if isinstance(error, asyncpg.PostgresError) else None
        if state == BEING_LAID_OUT:
            await asyncio.sleep(_LAYOUT_SECONDS)
            await self.directory.look()
            return True
        return (state == ELSEWHERE or 400 < status_for(error) <= 500) and await self._found_elsewhere(shard, find)

    async def _found_elsewhere(self, shard: int, find: Callable[[], Awaitable[int]]) -> bool:
        await self.directory.look([shard])
        return await find() != shard


async def call(handler: Handler, request: Request) -> Response:
    """The answer of a handler, whichever way it gives it."""
    answer = handler(request)
    return answer if isinstance(answer, Response) else await answer


def with_body(request: Request, body: bytes) -> Request:
    """The same request about something else."""
    return _again(request, body, request.query)


def with_query(request: Request, **query: Any) -> Request:
    """The same request with other parameters."""
    return _again(request, request.body, {**request.query, **{key: str(value) for key, value in query.items()}})


def _again(request: Request, body: bytes, query: Mapping[str, str]) -> Request:
    again = Request(
        request.method, request.path, request.params, query, request.headers, body, request.peer, request.route
    )
    request.on_disconnect(again.disconnect)
    return again


def _is_refusal(response: Response) -> bool:
    return response.status in (404, 409) or (_REFUSED in response.body)
