"""Leases of the messages that a consumer has and has not settled: renewed, acknowledged and released in batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from kombu.log import get_logger

from queen.celery.link import Address, Link
from queen.chunks import chunks
from queen.client.errors import TRANSIENT, RequestError

_BATCH = 1000
_RETRY_SECONDS = 0.2

logger = get_logger("queen.celery")


class Lease(msgspec.Struct, frozen=True):
    """What a server needs to know to settle an item."""

    id: int
    namespace: str
    topic: str
    lease_owner: str


class Replacement(Lease, frozen=True):
    """A leased item, and the one that takes its place."""

    item: dict[str, Any]


class Refusal(Lease, frozen=True):
    """A leased item that becomes a dead letter at once."""

    error: str
    dlq: bool = True


class _Extension(Lease, frozen=True):
    seconds: float = 0.0


class _Settled(msgspec.Struct):
    id: int
    success: bool
    error: str | None = None


class _Committed(msgspec.Struct):
    success: bool
    error: str | None = None


_results = msgspec.json.Decoder(list[_Settled])
_committed = msgspec.json.Decoder(_Committed)


class Leases:
    """The leases of one connection. A thread settles them, so that neither a task nor an event loop waits for it."""

    def __init__(self, address: Address, seconds: float) -> None:
        """Leases last `seconds`, and are renewed three times as often."""
        self.seconds = seconds
        self._link = Link(address)
        self._held: dict[int, Lease] = {}
        self._settled: SimpleQueue[tuple[str, Lease] | threading.Event | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def hold(self, leases: Iterable[Lease]) -> None:
        """Renew these leases until they are settled."""
        for lease in leases:
            self._held[lease.id] = lease
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="queen-leases", daemon=True)
                self._thread.start()

    def ack(self, lease: Lease) -> None:
        """The message is processed: remove it. A failed request is repeated while the lease lasts."""
        self._settle("ack", lease)

    def release(self, lease: Lease) -> None:
        """The message is not processed: it is ready again, and no failure is counted."""
        self._settle("release", lease)

    def replace(self, lease: Lease, item: dict[str, Any]) -> None:
        """The message is not processed, and another takes its place."""
        self._settle("replace", Replacement(lease.id, lease.namespace, lease.topic, lease.lease_owner, item))

    def refuse(self, lease: Lease, error: str) -> None:
        """The message can never be processed: it becomes a dead letter."""
        self._settle("nack", Refusal(lease.id, lease.namespace, lease.topic, lease.lease_owner, error))

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until everything settled before is at the server; False if that takes longer."""
        if self._thread is None or not self._thread.is_alive():
            return True
        done = threading.Event()
        self._settled.put(done)
        return done.wait(seconds)

    def close(self) -> None:
        """Stop renewing. What is settled later is sent by the caller's thread."""
        self.flush()
        self._stopped = True
        self._settled.put(None)

    def _settle(self, verb: str, lease: Lease) -> None:
        self._held.pop(lease.id, None)
        if self._stopped:
            # A task that ends after its connection was closed: the lease, if it still holds, does not depend on it.
            self._send(verb, [lease])
        else:
            self._settled.put((verb, lease))

    def _run(self) -> None:
        renew_at = time.monotonic() + self.seconds / 3
        while not self._stopped:
            batch, waiting = self._collect(renew_at - time.monotonic())
            for verb, leases in batch.items():
                self._send_until_lapsed(verb, leases)
            for done in waiting:
                done.set()
            if time.monotonic() >= renew_at:
                self._renew()
                renew_at = time.monotonic() + self.seconds / 3
        self._link.close()

    def _collect(self, timeout: float) -> tuple[dict[str, list[Lease]], list[threading.Event]]:
        """What is to be settled: everything that came while the request before was on its way, or the first to come."""
        batch: dict[str, list[Lease]] = {}
        waiting: list[threading.Event] = []
        try:
            entry = self._settled.get(timeout=max(0.0, timeout))
            for _ in range(_BATCH):
                if isinstance(entry, threading.Event):
                    waiting.append(entry)
                elif entry is not None:
                    batch.setdefault(entry[0], []).append(entry[1])
                entry = self._settled.get_nowait()
            self._settled.put(entry)
        except Empty:
            pass
        return batch, waiting

    def _send_until_lapsed(self, verb: str, leases: list[Lease]) -> None:
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                self._send(verb, leases)
                return
            except TRANSIENT as error:
                if self._stopped or time.monotonic() > deadline:
                    logger.error("%s of %d messages failed, they are delivered again: %s", verb, len(leases), error)
                    return
                time.sleep(_RETRY_SECONDS)
            except RequestError as error:
                logger.error("%s of %d messages was refused, they are delivered again: %s", verb, len(leases), error)
                return

    def _send(self, verb: str, leases: list[Lease]) -> None:
        if verb == "replace":
            for lease in leases:
                self._replace(lease)
            return
        for result in _results.decode(self._link.post(f"/api/v1/topics/{verb}", leases)):
            if not result.success:
                logger.warning("%s of message %d came after its lease had ended: %s", verb, result.id, result.error)

    def _replace(self, lease: Lease) -> None:
        assert isinstance(lease, Replacement)
        acknowledgment = {name: getattr(lease, name) for name in Lease.__struct_fields__}
        enqueue = {"type": "enqueue", "items": [lease.item]}
        operations = [{"type": "ackItem", **acknowledgment}, enqueue]
        answer = _committed.decode(self._link.post("/api/v1/transaction", {"operations": operations}))
        if not answer.success:
            logger.warning("message %d was requeued after its lease had ended: %s", lease.id, answer.error)

    def _renew(self) -> None:
        for part in chunks(list(self._held.values()), _BATCH):
            extensions = [_Extension(**msgspec.structs.asdict(one), seconds=self.seconds) for one in part]
            try:
                results = _results.decode(self._link.post("/api/v1/topics/extend", extensions))
            except RequestError as error:
                logger.warning("renewal of %d leases failed: %s", len(part), error)
                continue
            for result in results:
                # One that was settled meanwhile is no longer held, and not lost.
                if not result.success and self._held.pop(result.id, None) is not None:
                    logger.warning("the lease of message %d has ended; it is delivered again", result.id)
