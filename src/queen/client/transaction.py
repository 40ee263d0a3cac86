"""Transactions: acknowledgments, pushes, and changes of keys and timers that are applied atomically."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

from queen.client import state
from queen.client.consume.acks import LEASE_LOST, as_list, message_key, status_text
from queen.client.errors import LeaseLostError, PreconditionError, QueenConnectionError, TransactionError
from queen.client.http import HttpClient, decode_json, encode_json
from queen.client.push import TransactionIds, as_items, wire_item
from queen.client.topics.calls import NOT_LEASED, TopicSource, refs_of
from queen.client.topics.items import EnqueueItems, ItemRefs, wire_items
from queen.client.topics.topic import ItemOptions
from queen.client.types import Items, MessageRef, MessageRefs, TransactionResponse

T = TypeVar("T", bound="TransactionOperations")


class HeldLock(Protocol):
    """A lock of `Queen` or `QueenSync`."""

    @property
    def guard(self) -> dict[str, Any]:
        """The operation on keys that applies while it is held; raises `LockLostError`."""
        ...


class TransactionOperations:
    """Collects the operations of a transaction.

    Acknowledgments carry their lease: if it has expired, the transaction is rejected.
    """

    def __init__(self, http: HttpClient, ids: TransactionIds) -> None:
        self._http = http
        self._ids = ids
        self._operations: list[dict[str, Any]] = []
        self._kv: list[dict[str, Any]] = []
        self._timers: list[dict[str, Any]] = []
        self._leases: dict[str, None] = {}
        self._own_ids: list[str] = []

    def ack(
        self,
        messages: MessageRef | MessageRefs,
        status: bool | str = "completed",
        context: Mapping[str, Any] | None = None,
    ) -> Self:
        """Acknowledge one or several messages; `context` may hold the `consumer_group` and an `error`.

        The status `failed` moves a message to the dead letter queue at once: transactions do not retry.
        """
        context = context or {}
        group = context.get("consumer_group") or context.get("group")
        for message in as_list(messages):
            transaction_id, partition_id, lease_id = message_key(message)
            operation = {
                "type": "ack",
                "transactionId": transaction_id,
                "partitionId": partition_id,
                "status": status_text(status),
            }
            optional = {"consumerGroup": group, "leaseId": lease_id, "error": context.get("error")}
            operation.update({name: value for name, value in optional.items() if value})
            self._operations.append(operation)
            if lease_id:
                self._leases[lease_id] = None
        return self

    def queue(self, name: str) -> TransactionQueue[Self]:
        """The queue to push to."""
        return TransactionQueue(self, name)

    def push(self, queue: str, partition: str | None, items: Items) -> Self:
        """Add messages; the fluent form is `queue(name).partition(name).push(items)`."""
        # With transaction ids, a commit retried because its response was lost cannot push twice.
        given = as_items(items)
        formatted = [wire_item(item, queue, partition, self._ids) for item in given]
        self._operations.append({"type": "push", "items": formatted})
        self._own_ids += [
            made["transactionId"] for item, made in zip(given, formatted, strict=True) if not item.get("transactionId")
        ]
        return self

    def topic(self, namespace: str, name: str) -> TransactionTopic[Self]:
        """The topic to enqueue to, or whose items to acknowledge."""
        return TransactionTopic(self, self._ids, TopicSource(namespace, (name,)))

    def add(self, operations: Iterable[dict[str, Any]]) -> Self:
        """Add operations in wire format."""
        self._operations += operations
        return self

    def kv(self, namespace: str) -> TransactionKeys[Self]:
        """The keys of a namespace: changes of them are judged first, and happen with the rest."""
        return TransactionKeys(self, namespace)

    def timers(self, queue: str) -> TransactionTimers[Self]:
        """The timers of a queue."""
        return TransactionTimers(self, queue)

    def guard(self, lock: HeldLock) -> Self:
        """Commit only while a lock is held; raises `LockLostError` when it is known to be lost."""
        return self.ride(kv=[lock.guard])

    def ride(self, *, kv: Iterable[dict[str, Any]] = (), timers: Iterable[dict[str, Any]] = ()) -> Self:
        """Add operations on keys and timers in wire format."""
        self._kv += kv
        self._timers += timers
        return self

    async def _commit(self) -> TransactionResponse:
        if not (self._operations or self._kv or self._timers):
            raise TransactionError("Transaction has no operations to commit")
        body: dict[str, Any] = {"operations": self._operations, "requiredLeases": list(self._leases)}
        body |= ({"kv": self._kv} if self._kv else {}) | ({"timers": self._timers} if self._timers else {})
        response = await self._http.send("POST", "/api/v1/transaction", encode_json(body))
        result: TransactionResponse = decode_json(response.body)
        if result.get("success"):
            return result
        text = result.get("error") or "Transaction failed"
        if response.attempts > 1 and any(repr(made) in text for made in self._own_ids):
            # The id was generated here: the earlier attempt, whose response was lost, has been applied.
            return {"success": True, "results": []}
        precondition = result.get("kvReason")
        if precondition is None and LEASE_LOST not in text and NOT_LEASED not in text:
            raise TransactionError(text, result.get("results") or [])
        if response.attempts > 1:
            raise QueenConnectionError(f"the response to a commit was lost, it may have been applied: {text}")
        if precondition is not None:
            raise PreconditionError(text, precondition, result.get("value"), result.get("version"))
        raise LeaseLostError(text)


class Transaction(TransactionOperations):
    """`queen.transaction()`: add operations, then `commit()`."""

    async def commit(self) -> TransactionResponse:
        """Apply the operations atomically; raises `TransactionError` or `LeaseLostError` if rejected.

        `PreconditionError` is a `TransactionError` about a key. After `QueenConnectionError` the outcome is unknown.
        When a retry finds the commit applied, `results` are empty.
        """
        return await self._commit()


class TransactionQueue(Generic[T]):
    """A queue in a transaction."""

    def __init__(self, transaction: T, name: str) -> None:
        self._transaction = transaction
        self._name = name
        self._partition: str | None = None

    def partition(self, name: str) -> Self:
        """The partition to push to."""
        self._partition = name
        return self

    def push(self, items: Items) -> T:
        """Add messages; returns the transaction."""
        return self._transaction.push(self._name, self._partition, items)


class TransactionTopic(ItemOptions, Generic[T]):
    """A topic in a transaction."""

    def __init__(self, transaction: T, ids: TransactionIds, source: TopicSource) -> None:
        self._transaction = transaction
        self._ids = ids
        self._source = source

    def enqueue(self, items: EnqueueItems) -> T:
        """Add one or several items; returns the transaction. See `TopicBuilder.enqueue`."""
        where = {"namespace": self._source.namespace, "topic": self._source.names[0]}
        # Always with idempotency keys: a commit is retried when its response was lost.
        wired = wire_items(items, self._item, where, self._ids)
        return self._transaction.add([{"type": "enqueue", "items": wired}] if wired else [])

    def ack(self, items: ItemRefs) -> T:
        """Acknowledge one or several items; if a lease has expired, the transaction is rejected."""
        return self._transaction.add({"type": "ackItem", **ref} for ref in refs_of(items, self._source))


class TransactionKeys(Generic[T]):
    """Keys in a transaction: a change that does not apply has it rejected, unless `required=False`."""

    def __init__(self, transaction: T, namespace: str) -> None:
        self._transaction = transaction
        self._namespace = namespace

    def put(
        self, key: str, value: Any, *, ttl: int | None = None, expect: int | None = None, required: bool = True
    ) -> T:
        """Write a key, for `ttl` seconds or for good; with `expect` only if that is its version (0: none)."""
        return self._ride(state.put(key, value, ttl, expect), required)

    def put_if_absent(self, key: str, value: Any = True, *, ttl: int | None = None, required: bool = True) -> T:
        """Write a key that does not exist: what is committed with it happens once."""
        return self._ride(state.put_if_absent(key, value, ttl), required)

    def incr(self, key: str, delta: int = 1, *, ttl: int | None = None, required: bool = True) -> T:
        """Add to a number, which begins at 0. Only a new key takes the `ttl`."""
        return self._ride(state.increment(key, delta, ttl), required)

    def delete(self, key: str, *, expect: int | None = None, required: bool = True) -> T:
        """Delete a key, with `expect` only that version."""
        return self._ride(state.delete(key, expect), required)

    def check(self, key: str, expect: int) -> T:
        """Commit only if a key has a version (0: if it does not exist)."""
        return self._ride({"op": "check", "key": key, "expect": expect}, required=True)

    def _ride(self, operation: dict[str, Any], required: bool) -> T:
        where = {"ns": self._namespace} | ({"required": True} if required else {})
        return self._transaction.ride(kv=[where | operation])


class TransactionTimers(Generic[T]):
    """Timers in a transaction."""

    def __init__(self, transaction: T, queue: str) -> None:
        self._transaction = transaction
        self._queue = queue

    def schedule(
        self, key: str, data: Any, *, seconds: float, partition: str | None = None, transaction_id: str | None = None
    ) -> T:
        """Push `data` some seconds after the commit, in place of what was scheduled under this key."""
        operation = state.schedule(self._queue, key, data, seconds, partition, transaction_id)
        return self._transaction.ride(timers=[operation])

    def cancel(self, key: str) -> T:
        """Push nothing."""
        return self._transaction.ride(timers=[state.cancel(self._queue, key)])
