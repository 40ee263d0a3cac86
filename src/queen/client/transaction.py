"""Acknowledgments and pushes that happen together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Self, TypeVar

from queen.client.acks import LEASE_LOST, as_list, message_key, status_text
from queen.client.errors import LeaseLostError, QueenConnectionError, TransactionError
from queen.client.http import HttpClient, decode_json, encode_json
from queen.client.push import TransactionIds, listed, wire_item
from queen.client.topics.calls import NOT_LEASED, TopicSource, refs_of
from queen.client.topics.items import Enqueued, GivenItems, wire_items
from queen.client.topics.topic import ItemOptions
from queen.client.types import Given, GivenMany, Items, TransactionResponse

T = TypeVar("T", bound="TransactionOperations")


class TransactionOperations:
    """Collects operations.

    Acknowledgments carry their lease: where it was lost, another consumer has the message, and nothing is applied.
    """

    def __init__(self, http: HttpClient, ids: TransactionIds) -> None:
        self._http = http
        self._ids = ids
        self._operations: list[dict[str, Any]] = []
        self._leases: dict[str, None] = {}
        self._own_ids: list[str] = []

    def ack(
        self,
        messages: Given | GivenMany,
        status: bool | str = "completed",
        context: Mapping[str, Any] | None = None,
    ) -> Self:
        """Acknowledge one message or many; `context` may name the `consumer_group` and an `error`.

        The status `failed` makes a dead letter at once: inside a transaction nothing is retried.
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
        """Choose the queue to push to."""
        return TransactionQueue(self, name)

    def push(self, queue: str, partition: str | None, items: Items) -> Self:
        """Add messages; the fluent form is `queue(name).partition(name).push(items)`."""
        # With ids of their own, a commit that is repeated because its answer was lost cannot push twice.
        given = listed(items)
        formatted = [wire_item(item, queue, partition, self._ids) for item in given]
        self._operations.append({"type": "push", "items": formatted})
        self._own_ids += [
            made["transactionId"] for item, made in zip(given, formatted, strict=True) if not item.get("transactionId")
        ]
        return self

    def topic(self, namespace: str, name: str) -> TransactionTopic[Self]:
        """Choose the topic to enqueue to, or whose items are done."""
        return TransactionTopic(self, self._ids, TopicSource(namespace, (name,)))

    def add(self, operations: Iterable[dict[str, Any]]) -> Self:
        """Add operations as the server takes them."""
        self._operations += operations
        return self

    async def _commit(self) -> TransactionResponse:
        if not self._operations:
            raise TransactionError("Transaction has no operations to commit")
        body = {"operations": self._operations, "requiredLeases": list(self._leases)}
        answer = await self._http.send("POST", "/api/v1/transaction", encode_json(body))
        result: TransactionResponse = decode_json(answer.body)
        if result.get("success"):
            return result
        text = result.get("error") or "Transaction failed"
        if answer.attempts > 1 and any(repr(made) in text for made in self._own_ids):
            # Nobody else has this id: it is there because the attempt before, whose answer was lost, was applied.
            return {"success": True, "results": []}
        if not text.endswith(LEASE_LOST) and NOT_LEASED not in text:
            raise TransactionError(text, result.get("results") or [])
        if answer.attempts > 1:
            raise QueenConnectionError(f"the answer to a commit was lost, and it may have been applied: {text}")
        raise LeaseLostError(text)


class Transaction(TransactionOperations):
    """`queen.transaction()`: operations, and `commit()` sends them as one."""

    async def commit(self) -> TransactionResponse:
        """Apply everything; raises `TransactionError` or `LeaseLostError` when nothing was applied.

        `QueenConnectionError` means that it is not known. Where an answer was lost and the commit is found to have
        been applied, `results` are empty.
        """
        return await self._commit()


class TransactionQueue(Generic[T]):
    """Where a push of a transaction goes."""

    def __init__(self, transaction: T, name: str) -> None:
        self._transaction = transaction
        self._name = name
        self._partition: str | None = None

    def partition(self, name: str) -> Self:
        """Choose the partition."""
        self._partition = name
        return self

    def push(self, items: Items) -> T:
        """Add messages, and go on with the transaction."""
        return self._transaction.push(self._name, self._partition, items)


class TransactionTopic(ItemOptions, Generic[T]):
    """What a transaction does with a topic."""

    def __init__(self, transaction: T, ids: TransactionIds, source: TopicSource) -> None:
        self._transaction = transaction
        self._ids = ids
        self._source = source

    def enqueue(self, items: Enqueued) -> T:
        """Add an item or many, and go on with the transaction; see `TopicBuilder.enqueue`."""
        where = {"namespace": self._source.namespace, "topic": self._source.names[0]}
        # Always with keys: a commit is repeated when its answer was lost.
        wired = wire_items(items, self._item, where, self._ids)
        return self._transaction.add([{"type": "enqueue", "items": wired}] if wired else [])

    def ack(self, items: GivenItems) -> T:
        """An item or many are done; where one of them is not leased any more, nothing is applied."""
        return self._transaction.add({"type": "ackItem", **ref} for ref in refs_of(items, self._source))
