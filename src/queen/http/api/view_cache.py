"""Answers that the workers of a host find for each other, in files of the directory that they share."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from queen.concurrency import cache_seconds
from queen.http.server.message import Handler, Request, Response

log = logging.getLogger(__name__)

# So many files at most, whatever is asked for; two answers of one file take turns.
_SLOTS: Final = 256
_MOST_BYTES: Final = 4 * 1024 * 1024


class Found(msgspec.Struct, array_like=True, frozen=True):
    """An answer, and until when (of the clock that all processes of the host share) it is given again."""

    key: str
    good_until: float
    status: int
    body: bytes
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def response(self) -> Response:
        return Response(self.status, self.body, self.content_type, self.headers)


@dataclass(frozen=True, slots=True)
class Claim:
    """This worker finds an answer, and the others of its host wait for it. Ends with the process that has it."""

    file: int

    def end(self) -> None:
        os.close(self.file)


class HostViewCache:
    """Looks for answers of other workers, and leaves answers for them. Everything here waits for the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def look(self, key: str, now: float) -> Found | Claim | None:
        """The answer when another worker has it, else the right to find it; None while another finds it."""
        path = self._path(key)
        if (found := _read(path, key, now)) is not None:
            return found
        file = os.open(path.with_suffix(".claim"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        # It may have been found between the look and the claim.
        if (found := _read(path, key, now)) is not None:
            os.close(file)
            return found
        return Claim(file)

    def leave(self, key: str, good_until: float, response: Response) -> None:
        """Give the others an answer, for which this worker has the claim."""
        if len(response.body) > _MOST_BYTES:
            return
        path = self._path(key)
        draft = path.with_suffix(".draft")
        draft.write_bytes(
            msgspec.msgpack.encode(
                Found(key, good_until, response.status, bytes(response.body), response.content_type, response.headers)
            )
        )
        draft.replace(path)

    def _path(self, key: str) -> Path:
        slot = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()) % _SLOTS
        return self._directory / f"answer-{slot}"


def _read(path: Path, key: str, now: float) -> Found | None:
    try:
        found = _DECODER.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s cannot be read, so its answer is found anew: %s", path, error)
        return None
    return found if found.key == key and found.good_until > now else None


_DECODER: Final = msgspec.msgpack.Decoder(Found)


Find: TypeAlias = Callable[[Request], Response | Awaitable[Response]]


_MOST_KEPT: Final = 100
_LOOK_AGAIN_SECONDS: Final = 0.01
_PATIENCE_SECONDS: Final = 5.0
_OFTEN: Final = 5
"""Requests in a second that make an answer one that many ask for."""
_WHILE_ASKED_OFTEN: Final = 1.0
"""Seconds for which that is given again."""


@dataclass(slots=True, eq=False)
class _Shared:
    finding: asyncio.Task[Response]
    demand: _Demand
    good_until: float = 0.0
    dear: bool = False


@dataclass(slots=True, eq=False)
class _Demand:
    """How often something is asked for, in this second and in the one before."""

    since: float
    count: int = 0
    before: int = 0

    def note(self, now: float) -> None:
        if now - self.since >= 1.0:
            self.before = self.count if now - self.since < 2.0 else 0
            self.since, self.count = now, 0
        self.count += 1

    @property
    def high(self) -> bool:
        return max(self.count, self.before) >= _OFTEN


class ViewCache:
    """Finds each answer for all who ask while it is being found, and gives it again for a while (`good_for`).

    What many ask for is given again for a second, however quickly it is found. That, and what is not found quickly,
    one worker finds for all of its `host`.
    """

    def __init__(
        self, seconds: float, host: HostViewCache | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._host = host if seconds else None
        self._clock = clock
        self._answers: dict[str, _Shared] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def of(self, find: Find) -> Handler:
        """A handler that gives what `find` gives for the same path and query."""

        async def answer(request: Request) -> Response:
            query = request.query
            key = json.dumps([request.path, *sorted(query.items())]) if query else request.path
            shared, now = self._answers.get(key), self._clock()
            demand = shared.demand if shared is not None else _Demand(now)
            demand.note(now)
            if shared is None or (shared.finding.done() and now >= shared.good_until):
                dear = shared is not None and shared.dear
                finding = asyncio.create_task(self._find(find, request, key, dear or demand.high))
                shared = self._answers[key] = _Shared(finding, demand, dear=dear)
            # Whoever goes away must not take the answer from the others.
            return await asyncio.shield(shared.finding)

        return answer

    async def _find(self, find: Find, request: Request, key: str, for_all: bool) -> Response:
        claim = await self._claim(self._host, key) if for_all and self._host is not None else None
        if isinstance(claim, Found):
            self._answers[key].good_until = claim.good_until
            return claim.response()
        try:
            began = self._clock()
            found = find(request)
            response = found if isinstance(found, Response) else await found
            good_until = self._remember(key, began)
            if self._host is not None and claim is not None and good_until:
                await self._leave(self._host, key, good_until, response)
        except BaseException:
            self._answers.pop(key, None)
            raise
        finally:
            if claim is not None:
                claim.end()
        self._tidy()
        return response

    async def _claim(self, host: HostViewCache, key: str) -> Found | Claim | None:
        """What another worker has found, else the right to find it; None when it cannot be had."""
        patience = self._clock() + _PATIENCE_SECONDS
        try:
            while (claim := await asyncio.to_thread(host.look, key, self._clock())) is None:
                if self._clock() > patience:
                    break
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        except OSError as error:
            log.warning("answers are not shared among the workers of this host: %s", error)
            return None
        return claim

    async def _leave(self, host: HostViewCache, key: str, good_until: float, response: Response) -> None:
        try:
            await asyncio.to_thread(host.leave, key, good_until, response)
        except OSError as error:
            log.warning("an answer is not shared with the other workers of this host: %s", error)

    def _remember(self, key: str, began: float) -> float:
        """Until when the answer that was just found is given again; 0: it is not."""
        now = self._clock()
        again = cache_seconds(now - began, self._seconds)
        shared = self._answers[key]
        shared.dear = again > 0
        if shared.demand.high:
            again = max(again, min(_WHILE_ASKED_OFTEN, self._seconds))
        shared.good_until = now + again if again else 0.0
        return shared.good_until

    def _tidy(self) -> None:
        if len(self._answers) <= _MOST_KEPT:
            return
        now = self._clock()
        self._answers = {
            key: shared for key, shared in self._answers.items() if not shared.finding.done() or shared.good_until > now
        }
