"""Jobs: calls of tasks on their way, and what came of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from queen.client.errors import TRANSIENT, RequestError
from queen.errors import QueenError
from queen.tasks.connection import Connection

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
    unique: str = ""
    """Its unique key, which is free again when the job has ended."""


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


class Job(Generic[R]):
    """A call that was deferred."""

    def __init__(self, identity: str, connection: Connection) -> None:
        self.id = identity
        self._connection = connection

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    async def status(self) -> Status:
        """`waiting` (or running, or forgotten), `done` or `failed`."""
        return (await self._load()).status

    async def result(self, seconds: float | None = 30.0) -> R:
        """What the task returned; waits for it up to `seconds`. Raises `JobFailed` or `TimeoutError`."""
        unavailable: RequestError | None = None
        for pause in self._pauses(seconds):
            try:
                outcome = await self._load()
            except TRANSIENT as error:
                unavailable = error
            else:
                unavailable = None
                if outcome.status != "waiting":
                    return self._returned(outcome)
            await asyncio.sleep(pause)
        raise self._too_late(seconds) from unavailable

    def status_sync(self) -> Status:
        """`status` in a program without an event loop."""
        return self._load_sync().status

    def result_sync(self, seconds: float | None = 30.0) -> R:
        """`result` in a program without an event loop."""
        unavailable: RequestError | None = None
        for pause in self._pauses(seconds):
            try:
                outcome = self._load_sync()
            except TRANSIENT as error:
                unavailable = error
            else:
                unavailable = None
                if outcome.status != "waiting":
                    return self._returned(outcome)
            time.sleep(pause)
        raise self._too_late(seconds) from unavailable

    async def _load(self) -> Outcome:
        return _read_outcome((await self._connection.run_kv(_get(self.id)))[0])

    def _load_sync(self) -> Outcome:
        return _read_outcome(self._connection.run_kv_sync(_get(self.id))[0])

    def _returned(self, outcome: Outcome) -> R:
        if outcome.status == "failed":
            raise JobFailed(outcome.error)
        result: R = outcome.result
        return result

    def _pauses(self, seconds: float | None) -> Iterator[float]:
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        pause = _FIRST_PAUSE_SECONDS
        yield min(pause, max(0.0, deadline - time.monotonic()))
        while (left := deadline - time.monotonic()) > 0:
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
            yield min(pause, left)

    def _too_late(self, seconds: float | None) -> TimeoutError:
        return TimeoutError(f"job {self.id} is not done after {seconds} s")


def following_id(job: str) -> str:
    """The id of the next step after a job whose own was not known when it was deferred."""
    return f"{job}.then"


def put_outcome(job: str, outcome: Outcome, seconds: int) -> dict[str, Any]:
    """The operation that keeps an outcome for `seconds`."""
    return {"op": "put", "key": f"job.{job}", "value": outcome, "ttlSeconds": seconds}


def _get(job: str) -> dict[str, Any]:
    return {"op": "get", "key": f"job.{job}"}


def _read_outcome(found: Mapping[str, Any]) -> Outcome:
    return msgspec.convert(found["value"], Outcome) if found["found"] else Outcome()
