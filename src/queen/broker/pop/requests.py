"""A request for messages, and its state while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from queen.log.catalog import QUEUE_MODE, Queue
from queen.metrics.meter import Meter, clock
from queen.wire.binary.pop import MAGIC


class PopRequest(msgspec.Struct, frozen=True, gc=False):
    """The parameters of a pop: one queue, or several in the order given, and the options."""

    queues: tuple[str, ...] = ()
    partition: str | None = None
    group: str = QUEUE_MODE
    batch: int = 1
    partitions: int = 1
    auto_ack: bool = False
    wait: bool = False
    timeout: float = 30.0
    subscription_mode: str = ""
    subscription_from: datetime | None = None
    lease_seconds: int | None = None
    """How long its lease lasts; None: as the queue says."""
    conflation: bool | None = None
    """Whether its group is to get only the newest message of a partition; None: it does not say."""

    frames: bool = False
    """Whether it is answered with binary records, where that can be."""

    def waiting(self, seconds: float) -> PopRequest:
        """The same, waiting at most this long."""
        return replace(self, wait=True, timeout=seconds)

    def at_once(self) -> PopRequest:
        """The same, without waiting."""
        return replace(self, wait=False)

    def of(self, queues: tuple[str, ...]) -> PopRequest:
        """The same for other queues."""
        return replace(self, queues=queues)


def unchanged(body: bytes | None) -> bytes | None:
    """The `render` of pops whose caller needs the JSON itself."""
    return body


_encode = msgspec.json.encode
_EMPTY: Final = b'{"success":true,"messages":[]'


def state_conflation(body: bytes | None, request: PopRequest, applied: bool | None) -> bytes | None:
    """The answer to a pop; if the request asked about conflation, it states whether the group has it, also when empty.

    What the group was registered with holds (`applied`; None: it has not been registered yet).
    """
    asked = request.conflation
    if asked is None:
        return body
    conflict = applied is not None and applied != asked
    if body is None:
        if not (asked or conflict):
            return None
        echo = b',"conflation":true' if (asked if applied is None else applied) else b""
        queue, group = _encode(request.queues[0] if len(request.queues) == 1 else ""), _encode(request.group)
        head = b',"queue":%b,"partition":"","partitionId":"","leaseId":"","consumerGroup":%b' % (queue, group)
        return _EMPTY + head + b',"partitionsClaimed":0' + echo + (b',"conflationConflict":true}' if conflict else b"}")
    if not conflict or is_empty(body) or body.startswith(MAGIC):
        return body
    return body[:-1] + b',"conflationConflict":true}'


def is_empty(body: bytes | None) -> bool:
    """Whether the answer to a pop has no messages."""
    return body is None or body.startswith(_EMPTY)


def conflates(body: bytes) -> bool:
    """Whether the answer to a pop says that its group gets only the newest message of a partition."""
    # The last one found is behind the messages, whatever is in them.
    return b',"conflation":true' in body[body.rfind(b',"partitionsClaimed":') :]


class WaitList(Protocol):
    """Where a pop waits to be served."""

    def forget(self, pop: Pop) -> None: ...


class Pop:
    """One request for messages. Its answer is what `render` makes of the JSON body, or of None for nothing."""

    __slots__ = (
        "answer",
        "began",
        "busy",
        "conflates",
        "counted",
        "expired",
        "lanes",
        "meter",
        "parked_at",
        "render",
        "request",
        "timer",
    )

    def __init__(
        self, request: PopRequest, render: Callable[[bytes | None], Any], answer: asyncio.Future[Any], meter: Meter
    ) -> None:
        self.request = request
        self.render = render
        self.answer = answer
        self.meter = meter
        self.began = clock()
        self.timer: asyncio.TimerHandle | None = None
        self.parked_at = 0.0
        # Set while a claim is under way for it, so that no other lane claims for it too.
        self.busy = False
        # Its time was up while a claim was under way: it takes what the claim brings, but waits no more.
        self.expired = False
        self.lanes: set[WaitList] = set()
        self.counted: tuple[str, ...] | None = None
        """The queues for which it was counted."""
        self.conflates: bool | None = None
        """Whether its group gets only the newest message of a partition, once it is known."""

    @property
    def done(self) -> bool:
        return self.answer.done()

    def is_parked(self, seconds: float) -> bool:
        """Whether it has been waiting for longer than that."""
        if self.timer is None:
            return False
        return asyncio.get_running_loop().time() - self.parked_at > seconds

    def park(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait, at most as long as the request says."""
        self.parked_at = loop.time()
        self.timer = loop.call_later(self.request.timeout, self.expire)

    def expire(self) -> None:
        """The timeout has passed."""
        self.expired = True
        if not self.busy:
            self.resolve(None)

    def resolve(self, body: bytes | None) -> None:
        self._leave()
        if self.answer.done():
            return
        if body is None:
            self.meter.pop_found_nothing(self.counted or ())
        else:
            self.meter.pop_latency.observe(clock() - self.began)
        try:
            if self.request.conflation is not None:
                body = state_conflation(body, self.request, self.conflates)
            rendered = self.render(body)
        except Exception as error:
            # The claim serves other pops, too: they are not to fail with this one.
            self.answer.set_exception(error)
        else:
            self.answer.set_result(rendered)

    def fail(self, error: Exception) -> None:
        self._leave()
        if not self.answer.done():
            self.answer.set_exception(error)

    def _leave(self) -> None:
        """Drop references, so that the answer can be freed once it is sent."""
        if self.timer is not None:
            self.timer.cancel()
        for lane in self.lanes:
            lane.forget(self)
        self.lanes.clear()


class ClosedQueuePops:
    """Pops by the name of the queue that they wait for, which does not exist or is paused."""

    def __init__(self) -> None:
        self._pops: dict[str, list[Pop]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pops.values()))

    def __iter__(self) -> Iterator[Pop]:
        return iter([pop for pops in self._pops.values() for pop in pops])

    def queue_names(self) -> set[str]:
        return set(self._pops)

    def add(self, name: str, pop: Pop) -> None:
        waiting = self._pops.setdefault(name, [])
        waiting[:] = [other for other in waiting if not other.done]
        waiting.append(pop)

    def leave(self, name: str, queue: Queue | None = None) -> list[Pop]:
        """The pops that waited for a queue and still do; where it is given, without those that it is paused for."""
        waiting = [pop for pop in self._pops.pop(name, ()) if not pop.done]
        if queue is None:
            return waiting
        staying = [pop for pop in waiting if queue.is_paused_for(pop.request.group)]
        if staying:
            self._pops[name] = staying
        return [pop for pop in waiting if not queue.is_paused_for(pop.request.group)]

    def waiting(self) -> dict[str, int]:
        """How many pops wait for each queue."""
        counts = {name: sum(1 for pop in pops if not pop.done) for name, pops in self._pops.items()}
        return {name: count for name, count in counts.items() if count}

    def sweep(self) -> None:
        """Forget the queues that no pop waits for any more."""
        self._pops = {name: pops for name, pops in self._pops.items() if not all(pop.done for pop in pops)}
