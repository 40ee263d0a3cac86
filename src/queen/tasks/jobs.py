"""Jobs: calls of tasks on their way, and what came of them."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from queen.client.client import Queen
from queen.errors import QueenError

R = TypeVar("R")

Status: TypeAlias = Literal["waiting", "done", "failed"]

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.5


class JobFailed(QueenError):
    """The job failed for the last time; the message is that of its error."""


class Step(msgspec.Struct, omit_defaults=True):
    """A call of a task, as it is enqueued; `then` are the calls that follow, with the result as first argument."""

    job: str
    task: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    then: list[Step] = []


class Outcome(msgspec.Struct, omit_defaults=True):
    """What came of a job."""

    status: Status = "waiting"
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What a running task can know of itself."""

    job: str
    task: str
    attempt: int
    """1 for the first."""


_current: ContextVar[Context] = ContextVar("queen_job")


def current_job() -> Context:
    """The job that runs here; raises `LookupError` outside of one."""
    return _current.get()


class Outcomes:
    """Where outcomes are kept: keys that expire."""

    def __init__(self, queen: Queen, namespace: str) -> None:
        self._queen = queen
        self._namespace = namespace

    async def save(self, job: str, outcome: Outcome, seconds: int) -> None:
        await self._run({"op": "put", "key": _key(job), "value": outcome, "ttlSeconds": seconds})

    async def load(self, job: str) -> Outcome:
        found = await self._run({"op": "get", "key": _key(job)})
        return msgspec.convert(found["value"], Outcome) if found["found"] else Outcome()

    async def _run(self, operation: dict[str, Any]) -> dict[str, Any]:
        operation["ns"] = self._namespace
        answer = await self._queen.request("POST", "/api/v1/kv", {"operations": [operation]})
        result: dict[str, Any] = answer["results"][0]
        return result


def _key(job: str) -> str:
    return f"job.{job}"


class Job(Generic[R]):
    """A call that was deferred."""

    def __init__(self, identity: str, task: str, outcomes: Outcomes) -> None:
        self.id = identity
        self.task = task
        self._outcomes = outcomes

    def __repr__(self) -> str:
        return f"<Job {self.id} of task {self.task}>"

    async def status(self) -> Status:
        """`waiting` (or running, or forgotten), `done` or `failed`."""
        return (await self._outcomes.load(self.id)).status

    async def result(self, seconds: float | None = 30.0) -> R:
        """What the task returned; waits for it up to `seconds`. Raises `JobFailed` or `TimeoutError`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            outcome = await self._outcomes.load(self.id)
            if outcome.status == "done":
                result: R = outcome.result
                return result
            if outcome.status == "failed":
                raise JobFailed(outcome.error)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.id} of task {self.task} is not done after {seconds} s")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
