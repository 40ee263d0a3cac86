"""What a scenario is, and what it works with.

Read by two interpreters: pytest's, to list the scenarios, and the one that has the published client, to run them.
So it imports the standard library alone, and the client reaches a scenario as an argument.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

# The published client, its builders and its messages carry no types that this project's own package would not shadow.
Client: TypeAlias = Any
Message: TypeAlias = dict[str, Any]

TOKEN_VARIABLE = "QUEEN_ACCEPTANCE_TOKEN"
"""The token that clients are given, where servers ask for one."""


class Implementation(Enum):
    """The Python clients that scenarios are run with."""

    PUBLISHED = "published"
    """queen-mq 0.15 as it was published."""
    OWN = "own"
    """The client of this project."""

    @property
    def prefix(self) -> str:
        """What names of queues begin with, so that both can use one server."""
        return "test" if self is Implementation.PUBLISHED else "test-own"


class Server(Enum):
    """The servers that scenarios run against."""

    MAIN = "main"
    """Short intervals of the background jobs, and an encryption key."""
    NEW_BY_DEFAULT = "new-by-default"
    """Groups begin at new messages when they do not say where, and there is no encryption key."""


@dataclass(frozen=True)
class Scenario:
    """A named course of calls of a client, with the answers it must get."""

    module: str
    function: Callable[[Scene], Awaitable[None]]
    server: Server
    seconds: float
    alone: bool

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def id(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Scene:
    """One run of one scenario, with a client and queue names of its own."""

    scenario: Scenario
    url: str
    queen: Client
    new_client: Callable[..., Client]
    prefix: str = "test"

    def queue_name(self, suffix: str = "") -> str:
        name = f"{self.prefix}-{self.scenario.module}-{self.scenario.name}".replace("_", "-")
        return f"{name}-{suffix}" if suffix else name

    @asynccontextmanager
    async def queue(self, suffix: str = "", **options: Any) -> AsyncIterator[str]:
        """A configured queue, deleted afterwards; options are the client's (snake case)."""
        name = self.queue_name(suffix)
        created = await self.queen.queue(name).config(options).create()
        assert created["configured"] is True, created
        yield name
        deleted = await self.queen.queue(name).delete()
        assert deleted["deleted"] is True, deleted


def scenario(
    *, server: Server = Server.MAIN, seconds: float = 30.0, alone: bool = False
) -> Callable[[Callable[[Scene], Awaitable[None]]], Scenario]:
    """Make a scenario of a coroutine function.

    `seconds` is the time it takes at most on a quiet machine; `alone` keeps others from running at the same time,
    because it is heavy.
    """

    def make(function: Callable[[Scene], Awaitable[None]]) -> Scenario:
        return Scenario(function.__module__.rpartition(".")[2], function, server, seconds, alone)

    return make


class Stopwatch:
    """The seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun


def payloads(messages: list[Message]) -> list[Any]:
    return [message["data"] for message in messages]


def statuses(results: list[dict[str, Any]]) -> list[str]:
    return [result["status"] for result in results]
