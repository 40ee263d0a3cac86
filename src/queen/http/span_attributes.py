"""What a span says of the messages that a request moved, read from its request and its response.

The bodies are decoded once more for this, passing payloads over, and only for spans that are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import msgspec

from queen.broker.catalog import QUEUE_MODE
from queen.http.message import Request, Response
from queen.wire.push import DEFAULT_PARTITION

Attributes: TypeAlias = dict[str, str | int | bool]
Describe: TypeAlias = Callable[[Request, Response | None], Attributes]

DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
COUNT: Final = "messaging.batch.message_count"
GROUP: Final = "messaging.consumer.group.name"
MESSAGE: Final = "messaging.message.id"
TRANSACTION: Final = "queen.transaction_id"
COMMITTED: Final = "queen.transaction.committed"


class _Pushed(msgspec.Struct):
    queue: str
    partition: str = DEFAULT_PARTITION


class _Push(msgspec.Struct):
    items: list[_Pushed]


class _Stored(msgspec.Struct):
    transaction_id: str = ""
    message_id: str = ""


class _Message(msgspec.Struct):
    id: str
    transaction_id: str = msgspec.field(name="transactionId")
    partition: str


class _Popped(msgspec.Struct):
    queue: str
    messages: list[_Message]


class _Ack(msgspec.Struct):
    transaction_id: str = msgspec.field(default="", name="transactionId")
    consumer_group: str | None = msgspec.field(default=None, name="consumerGroup")
    acknowledgments: list[_Ack] | None = None


class _Acked(msgspec.Struct):
    queue: str | None = msgspec.field(default=None, name="queueName")
    partition: str | None = msgspec.field(default=None, name="partitionName")


class _Step(msgspec.Struct):
    type: str
    items: list[_Pushed] | None = None


class _Transaction(msgspec.Struct):
    operations: list[_Step]


class _Outcome(msgspec.Struct):
    success: bool


_push = msgspec.json.Decoder(_Push)
_stored = msgspec.json.Decoder(list[_Stored])
_popped = msgspec.json.Decoder(_Popped)
_ack = msgspec.json.Decoder(_Ack)
_acked = msgspec.json.Decoder(list[_Acked])
_transaction = msgspec.json.Decoder(_Transaction)
_outcome = msgspec.json.Decoder(_Outcome)


def describe_push(request: Request, response: Response | None) -> Attributes:
    items = _push.decode(request.body).items
    found = _destination((item.queue, item.partition) for item in items)
    found[COUNT] = len(items)
    if len(items) == 1 and response is not None:
        (stored,) = _stored.decode(response.body)
        found |= {MESSAGE: stored.message_id, TRANSACTION: stored.transaction_id}
    return found


def describe_pop(request: Request, response: Response | None) -> Attributes:
    found: Attributes = {GROUP: request.query.get("consumerGroup") or QUEUE_MODE}
    if "queue" in request.params:
        found[DESTINATION] = request.params["queue"]
    if "partition" in request.params:
        found[PARTITION] = request.params["partition"]
    if response is None:
        return found
    if not response.body:
        return found | {COUNT: 0}
    popped = _popped.decode(response.body)
    found |= {COUNT: len(popped.messages), DESTINATION: popped.queue}
    partitions = {message.partition for message in popped.messages}
    if len(partitions) == 1:
        found[PARTITION] = partitions.pop()
    if len(popped.messages) == 1:
        found |= {MESSAGE: popped.messages[0].id, TRANSACTION: popped.messages[0].transaction_id}
    return found


def describe_ack(request: Request, response: Response | None) -> Attributes:
    sent = _ack.decode(request.body)
    acks = [sent] if sent.acknowledgments is None else sent.acknowledgments
    found: Attributes = {COUNT: len(acks), GROUP: sent.consumer_group or QUEUE_MODE}
    if len(acks) == 1:
        found[TRANSACTION] = acks[0].transaction_id
    if response is not None:
        found |= _destination(
            (result.queue, result.partition)
            for result in _acked.decode(response.body)
            if result.queue is not None and result.partition is not None
        )
    return found


def describe_transaction(request: Request, response: Response | None) -> Attributes:
    operations = _transaction.decode(request.body).operations
    pushes = [item for operation in operations for item in operation.items or ()]
    acks = sum(operation.type == "ack" for operation in operations)
    found: Attributes = {COUNT: len(pushes) + acks}
    if response is not None:
        found[COMMITTED] = _outcome.decode(response.body).success
    return found | _destination((item.queue, item.partition) for item in pushes)


def _destination(places: Iterable[tuple[str, str]]) -> Attributes:
    """The queue and the partition, each where it is the same for all."""
    found = set(places)
    queues, partitions = {queue for queue, _ in found}, {partition for _, partition in found}
    attributes: Attributes = {DESTINATION: queues.pop()} if len(queues) == 1 else {}
    return attributes | {PARTITION: partitions.pop()} if attributes and len(partitions) == 1 else attributes
