"""Actions about messages: sending, receiving, deleting, and how long they are hidden; each one by one or in batches."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from queen.http.server.message import Access
from queen.http.sqs.attributes import LARGEST_MESSAGE, LONGEST_DELAY, LONGEST_VISIBILITY, LONGEST_WAIT, arn_of
from queen.http.sqs.call import Call, whole
from queen.http.sqs.errors import SqsError, invalid_parameter, invalid_value, missing_parameter
from queen.http.sqs.messages import (
    SYSTEM_ATTRIBUTES,
    Envelope,
    Handle,
    Outgoing,
    Received,
    Sent,
    check_size,
    checked_body,
    chosen_attributes,
    md5_of_attributes,
    md5_of_body,
    read_attributes,
    read_group,
    read_handle,
    size_of,
    system_attributes,
)
from queen.http.sqs.moves import moved_message
from queen.http.sqs.queues import SqsQueue

Answer = Mapping[str, Any]

_MOST_RECEIVED: Final = 10
# Messages that would be visible at once are hidden for as long as it takes to move those that were received too often.
_MOVING_SECONDS: Final = 30


async def send_message(call: Call) -> Answer:
    queue = await call.queue()
    message = _outgoing(call, queue, call.params)
    check_size(_size(message), queue.largest_message)
    (sent,) = await call.backend.store_of(queue).send(queue, [message])
    return _sent(sent, message)


async def send_message_batch(call: Call) -> Answer:
    queue = await call.queue()
    entries = call.entries()
    if queue.is_fifo:
        for entry in entries:
            # For SQS this concerns the request, and not the entry.
            _check_fifo_ids(queue, entry.get("MessageGroupId"), entry.get("MessageDeduplicationId"))
    messages, failed = _per_entry(entries, lambda entry: _outgoing(call, queue, entry))
    total = sum(_size(message) for _, message in messages)
    if total > LARGEST_MESSAGE:
        raise SqsError(
            "BatchRequestTooLong",
            f"Batch requests cannot be longer than {LARGEST_MESSAGE} bytes. You have sent {total} bytes.",
        )
    fitting = []
    for entry, message in messages:
        if _size(message) <= queue.largest_message:
            fitting.append((entry, message))
        else:
            failed.append(_failure(entry, _too_long(queue)))
    stored: Sequence[Sent] = []
    if fitting:
        stored = await call.backend.store_of(queue).send(queue, [message for _, message in fitting])
    done = [{"Id": entry["Id"], **_sent(sent, message)} for (entry, message), sent in zip(fitting, stored, strict=True)]
    return _batch(done, failed)


def _outgoing(call: Call, queue: SqsQueue, sent: Mapping[str, Any]) -> Outgoing:
    body = checked_body(sent.get("MessageBody"), most=queue.largest_message)
    group = read_group(sent.get("MessageGroupId"), "MessageGroupId")
    deduplication = read_group(sent.get("MessageDeduplicationId"), "MessageDeduplicationId")
    delay = whole(sent, "DelaySeconds", 0, LONGEST_DELAY)
    if queue.is_fifo:
        deduplication = _check_fifo(queue, body, group, deduplication, delay)
    elif deduplication:
        raise _not_of_this_type(deduplication, "MessageDeduplicationId")
    envelope = Envelope(
        attributes=read_attributes(sent.get("MessageAttributes")),
        system=read_attributes(sent.get("MessageSystemAttributes"), system=True),
        sender=call.sender,
        group=group,
        deduplication=deduplication,
    )
    return Outgoing(body=body, envelope=envelope, delay=delay)


def _check_fifo(queue: SqsQueue, body: str, group: str, deduplication: str, delay: int | None) -> str:
    """The deduplication id of a message."""
    _check_fifo_ids(queue, group, deduplication)
    if delay:
        raise _not_of_this_type(delay, "DelaySeconds")
    return deduplication or hashlib.sha256(body.encode()).hexdigest()


def _check_fifo_ids(queue: SqsQueue, group: object, deduplication: object) -> None:
    if not group:
        raise missing_parameter("MessageGroupId")
    if not deduplication and queue.attributes.get("ContentBasedDeduplication") != "true":
        raise invalid_parameter(
            "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId provided "
            "explicitly"
        )


def _not_of_this_type(value: object, parameter: str) -> SqsError:
    return invalid_value(value, parameter, "The request include parameter that is not valid for this queue type.")


def _size(message: Outgoing) -> int:
    return size_of(message.body, message.envelope.attributes)


def _too_long(queue: SqsQueue) -> SqsError:
    return invalid_parameter(
        f"One or more parameters are invalid. Reason: Message must be shorter than {queue.largest_message} bytes."
    )


def _sent(sent: Sent, message: Outgoing) -> dict[str, str]:
    answer = {"MessageId": sent.id, "MD5OfMessageBody": md5_of_body(message.body)}
    if message.envelope.attributes:
        answer["MD5OfMessageAttributes"] = md5_of_attributes(message.envelope.attributes)
    if message.envelope.system:
        answer["MD5OfMessageSystemAttributes"] = md5_of_attributes(message.envelope.system)
    if sent.sequence:
        answer["SequenceNumber"] = sent.sequence
    return answer


async def receive_message(call: Call) -> Answer:
    queue = await call.queue()
    limit = whole(call.params, "MaxNumberOfMessages", 1, _MOST_RECEIVED) or 1
    visibility = whole(call.params, "VisibilityTimeout", 0, LONGEST_VISIBILITY)
    wait = whole(call.params, "WaitTimeSeconds", 0, LONGEST_WAIT)
    if wait is None:
        wait = queue.number("ReceiveMessageWaitTimeSeconds")
    system = [*call.texts("AttributeNames"), *call.texts("MessageSystemAttributeNames")]
    for name in system:
        if name not in SYSTEM_ATTRIBUTES:
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {name[:80]}.")
    names = call.texts("MessageAttributeNames")
    attempt = read_group(call.params.get("ReceiveRequestAttemptId"), "ReceiveRequestAttemptId")
    if attempt and not queue.is_fifo:
        raise _not_of_this_type(attempt, "ReceiveRequestAttemptId")
    hidden = queue.visibility if visibility is None else visibility
    received = await call.backend.fifo.replay(queue, attempt, hidden) if attempt else None
    if received is None:
        receiving = asyncio.ensure_future(_receive(call, queue, limit, hidden, float(wait)))
        call.request.on_disconnect(receiving.cancel)
        received = await receiving
        if attempt and received:
            await call.backend.fifo.remember(queue, attempt, received)
    return {"Messages": [_shown(message, system, names) for message in received]} if received else {}


async def _receive(call: Call, queue: SqsQueue, limit: int, visibility: int, wait: float) -> list[Received]:
    """Lease messages; those that were received too often are moved to the dead-letter queue instead."""
    store, policy, in_flight = call.backend.store_of(queue), queue.policy, call.backend.in_flight
    left_to_wait = await in_flight.admit(queue, store, wait)
    if left_to_wait is None:
        return []
    loop = asyncio.get_running_loop()
    deadline = loop.time() + left_to_wait
    hidden = _MOVING_SECONDS if policy is not None and not visibility else visibility

    async def shown(messages: list[Received]) -> list[Received]:
        if hidden != visibility and messages:
            handles = [read_handle(message.handle, queue.name) for message in messages]
            await store.change_visibility(queue, handles, [visibility] * len(handles))
        return messages

    while True:
        received = await store.receive(queue, limit, hidden, max(0.0, deadline - loop.time()))
        in_flight.received(queue, len(received))
        target = None
        if policy is not None and any(message.receives > policy.most_receives for message in received):
            # Without it, messages stay where they are.
            target = await call.backend.catalog.find(policy.target)
        if policy is None or target is None:
            return await shown(received)
        source = arn_of(queue.name, call.region)
        dead = [message for message in received if message.receives > policy.most_receives]
        await call.backend.store_of(target).send(
            target, [moved_message(message, f"redrive:{queue.id}:{message.id}", source) for message in dead]
        )
        await store.delete(queue, [read_handle(message.handle, queue.name) for message in dead])
        left = [message for message in received if message.receives <= policy.most_receives]
        if left:
            return await shown(left)


def _shown(message: Received, system: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "MessageId": message.id,
        "ReceiptHandle": message.handle,
        "MD5OfBody": md5_of_body(message.body),
        "Body": message.body,
    }
    kept = system_attributes(message, system)
    if kept:
        shown["Attributes"] = kept
    chosen = chosen_attributes(message.envelope.attributes, names) if message.envelope.attributes else {}
    if chosen:
        shown["MessageAttributes"] = {name: one.shown() for name, one in chosen.items()}
        shown["MD5OfMessageAttributes"] = md5_of_attributes(chosen)
    return shown


async def delete_message(call: Call) -> Answer:
    queue = await call.queue()
    handle = read_handle(call.params.get("ReceiptHandle"), queue.name)
    (error,) = await call.backend.store_of(queue).delete(queue, [handle])
    if error is not None:
        raise error
    return {}


async def delete_message_batch(call: Call) -> Answer:
    queue = await call.queue()
    handles, failed = _per_entry(call.entries(), lambda entry: read_handle(entry.get("ReceiptHandle"), queue.name))
    if not handles:
        return _batch([], failed)
    errors = await call.backend.store_of(queue).delete(queue, [handle for _, handle in handles])
    return _outcomes(handles, errors, failed)


async def change_message_visibility(call: Call) -> Answer:
    queue = await call.queue()
    handle, seconds = _visibility(queue, call.params)
    (error,) = await call.backend.store_of(queue).change_visibility(queue, [handle], [seconds])
    if error is not None:
        raise error
    return {}


async def change_message_visibility_batch(call: Call) -> Answer:
    queue = await call.queue()
    changes, failed = _per_entry(call.entries(), lambda entry: _visibility(queue, entry))
    if not changes:
        return _batch([], failed)
    errors = await call.backend.store_of(queue).change_visibility(
        queue, [handle for _, (handle, _) in changes], [seconds for _, (_, seconds) in changes]
    )
    return _outcomes(changes, errors, failed)


def _visibility(queue: SqsQueue, sent: Mapping[str, Any]) -> tuple[Handle, int]:
    handle = read_handle(sent.get("ReceiptHandle"), queue.name)
    seconds = whole(sent, "VisibilityTimeout", 0, LONGEST_VISIBILITY)
    if seconds is None:
        raise missing_parameter("VisibilityTimeout")
    return handle, seconds


def _per_entry(
    entries: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]
) -> tuple[list[tuple[Mapping[str, Any], Any]], list[Answer]]:
    """What `read` makes of each entry of a batch, and the entries that it refuses."""
    done: list[tuple[Mapping[str, Any], Any]] = []
    failed: list[Answer] = []
    for entry in entries:
        try:
            done.append((entry, read(entry)))
        except SqsError as error:
            failed.append(_failure(entry, error))
    return done, failed


def _outcomes(
    entries: Sequence[tuple[Mapping[str, Any], Any]], errors: Sequence[SqsError | None], failed: list[Answer]
) -> Answer:
    done = []
    for (entry, _), error in zip(entries, errors, strict=True):
        if error is None:
            done.append({"Id": entry["Id"]})
        else:
            failed.append(_failure(entry, error))
    return _batch(done, failed)


def _failure(entry: Mapping[str, Any], error: SqsError) -> Answer:
    return {"Id": entry["Id"], "SenderFault": not error.is_server_fault, "Code": error.code, "Message": error.message}


def _batch(done: Sequence[Answer], failed: Sequence[Answer]) -> Answer:
    answer: dict[str, Any] = {"Successful": list(done)}
    if failed:
        answer["Failed"] = list(failed)
    return answer


MESSAGE_ACTIONS: Final[Mapping[str, tuple[Access, Callable[[Call], Awaitable[Answer]]]]] = {
    "SendMessage": (Access.READ_WRITE, send_message),
    "SendMessageBatch": (Access.READ_WRITE, send_message_batch),
    "ReceiveMessage": (Access.READ_WRITE, receive_message),
    "DeleteMessage": (Access.READ_WRITE, delete_message),
    "DeleteMessageBatch": (Access.READ_WRITE, delete_message_batch),
    "ChangeMessageVisibility": (Access.READ_WRITE, change_message_visibility),
    "ChangeMessageVisibilityBatch": (Access.READ_WRITE, change_message_visibility_batch),
}
