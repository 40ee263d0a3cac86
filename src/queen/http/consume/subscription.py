"""One subscription of a WebSocket: pops on behalf of the client as long as it has credit and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from queen.broker.pop.popper import Popper
from queen.broker.pop.requests import Pop, PopRequest, conflates, is_empty, unchanged
from queen.errors import DatabaseUnavailable

if TYPE_CHECKING:
    from queen.broker.sharding.sharded_broker import MovingPop, ShardedPopper

# Several partitions are claimed in one statement when several pops wait; more of them would only pile up batches for
# a client that stops reading.
MOST_POPS: Final = 4
MOST_CREDIT: Final = 1_000_000
# A parked pop costs nothing; it is merely renewed this often.
WAIT_SECONDS: Final = 60.0
RETRY_SECONDS: Final = 1.0


class SubscriptionListener(Protocol):
    """Where a subscription's batches go."""

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read at present."""

    def begun(self, subscription: Subscription) -> None:
        """The group has its place in the queue: whatever is pushed from now on is delivered."""

    def refused(self, subscription: Subscription, error: BaseException) -> None:
        """It could not begin."""

    def failed(self, subscription: Subscription, error: BaseException) -> None:
        """Popping failed; it is retried."""

    def deliver(self, subscription: Subscription, body: bytes) -> None:
        """A batch has come, the answer of a pop."""


class Subscription:
    """What is to be delivered, and how much more the client will take."""

    def __init__(
        self,
        id: str,
        request: PopRequest,
        credit: int,
        popper: Popper | ShardedPopper,
        listener: SubscriptionListener,
    ) -> None:
        self.id = id
        self.request = request.waiting(WAIT_SECONDS)
        self.credit = credit
        self.conflates = False
        """Whether its group gets only the newest message of a partition, once it has begun."""
        self._popper = popper
        self._listener = listener
        # Messages consumed at once are lost with the connection, so no more of them are fetched than can be sent.
        self._most_pops = 1 if request.auto_ack else MOST_POPS
        self._pops: set[Pop | MovingPop] = set()
        self._has_begun = False
        self._stopped = False
        self._when_idle: Callable[[], None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._reported = ""

    @property
    def is_idle(self) -> bool:
        """Whether no batch can come any more unless it asks again."""
        return not self._pops

    def begin(self) -> None:
        """Look once, without waiting: the answer means that the group has its place in the queue."""
        self._submit(self.request.at_once())

    def grant(self, credit: int) -> None:
        """The client takes `credit` more batches."""
        self.credit = min(MOST_CREDIT, self.credit + credit)
        self.ask()

    def ask(self) -> None:
        """Wait for as many batches as may be sent."""
        if not self._has_begun or self._stopped or self._retry is not None or self._listener.is_paused:
            return
        while len(self._pops) < min(self.credit, self._most_pops):
            self._submit(self.request)

    def hold(self) -> None:
        """Wait for no more batches until asked to; those on their way still come."""
        for pop in list(self._pops):
            pop.expire()

    def stop(self, when_idle: Callable[[], None]) -> None:
        """Stop popping. `when_idle` is called once the last batch under way has arrived."""
        self._stopped = True
        self._when_idle = when_idle
        self._cancel_retry()
        self.hold()
        if not self._pops:
            self._go_idle()

    def abandon(self) -> None:
        """The client is gone: what is being claimed is released."""
        self._stopped = True
        self._cancel_retry()
        for pop in list(self._pops):
            pop.answer.cancel()

    def _submit(self, request: PopRequest) -> None:
        pop = self._popper.begin(request, unchanged)
        self._pops.add(pop)
        pop.answer.add_done_callback(partial(self._answered, pop))

    def _answered(self, pop: Pop | MovingPop, answer: asyncio.Future[bytes | None]) -> None:
        self._pops.discard(pop)
        if answer.cancelled():
            return
        error = answer.exception()
        if error is not None:
            self._fail(error)
        else:
            self._reported = ""
            self._take(answer.result())
            self.ask()
        if self._stopped and not self._pops:
            self._go_idle()

    def _take(self, body: bytes | None) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.conflates = body is not None and conflates(body)
            self._listener.begun(self)
        if body is not None and not is_empty(body):
            self.credit -= 1
            self._listener.deliver(self, body)

    def _fail(self, error: BaseException) -> None:
        if not self._has_begun:
            self._stopped = True
            self._listener.refused(self, error)
        elif not self._stopped and self._retry is None:
            # An outage is reported once, whatever error each attempt fails with.
            failure = DatabaseUnavailable.__name__ if isinstance(error, DatabaseUnavailable) else str(error)
            if failure != self._reported:
                self._reported = failure
                self._listener.failed(self, error)
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.ask()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()

    def _go_idle(self) -> None:
        when_idle, self._when_idle = self._when_idle, None
        if when_idle is not None:
            when_idle()
