"""Transactions: acknowledgments and pushes that are applied atomically."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Self, TypeVar

from queen.client.consume.acks import LEASE_LOST, as_list, message_key, status_text
from queen.client.errors import LeaseLostError, QueenConnectionError, TransactionError
from queen.client.http import HttpClient, decode_json, encode_json
from queen.client.push import TransactionIds, as_items, wire_item
from queen.client.topics.calls import NOT_LEASED, TopicSource, refs_of
from queen.client.topics.items import EnqueueItems, ItemRefs, wire_items
from queen.client.topics.topic import ItemOptions
from queen.client.types import Items, MessageRef, MessageRefs, TransactionResponse

T = TypeVar("T", bound="TransactionOperations")


class TransactionOperations:
    """Collects the operations of a transaction.

    Acknowledgments carry their lease: if it has expired, the transaction is rejected.
    """

    def __init__(self, http: HttpClient, ids: TransactionIds) -> None:
        self._http = http
        self._ids = ids
        self._operations: list[dict[str, Any]] = []
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

    async def _commit(self) -> TransactionResponse:
        if not self._operations:
            raise TransactionError("Transaction has no operations to commit")
        body = {"operations": self._operations, "requiredLeases": list(self._leases)}
        response = await self._http.send("POST", "/api/v1/transaction", encode_json(body))
        result: TransactionResponse = decode_json(response.body)
        if result.get("success"):
            return result
        text = result.get("error") or "Transaction failed"
        if response.attempts > 1 and any(repr(made) in text for made in self._own_ids):
            # The id was generated here: the earlier attempt, whose response was lost, has been applied.
            return {"success": True, "results": []}
        if LEASE_LOST not in text and NOT_LEASED not in text:
            raise TransactionError(text, result.get("results") or [])
        if response.attempts > 1:
            raise QueenConnectionError(f"the response to a commit was lost, it may have been applied: {text}")
        raise LeaseLostError(text)


class Transaction(TransactionOperations):
    """`queen.transaction()`: add operations, then `commit()`."""

    async def commit(self) -> TransactionResponse:
        """Apply the operations atomically; raises `TransactionError` or `LeaseLostError` if rejected.

        After `QueenConnectionError` the outcome is unknown. When a retry finds the commit applied, `results` are empty.
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
