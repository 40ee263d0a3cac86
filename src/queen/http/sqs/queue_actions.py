"""Actions about queues: creating, listing, attributes, tags, purging, and tasks that move messages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from queen.http.server.message import Access
from queen.http.sqs.attributes import (
    ALL,
    COUNTERS,
    FIFO_SUFFIX,
    READABLE,
    allows_source,
    arn_of,
    check_queue_name,
    check_together,
    read_attributes,
    redrive_policy,
    with_defaults,
)
from queen.http.sqs.call import Call, whole
from queen.http.sqs.errors import SqsError, invalid_parameter, invalid_value, missing_parameter, no_such_queue
from queen.http.sqs.queues import SqsQueue

Answer = Mapping[str, Any]

_MOST_LISTED: Final = 1000
_MOST_TAGS: Final = 50
_NOTHING: Final[Answer] = {}


async def create_queue(call: Call) -> Answer:
    name = call.check_admitted(check_queue_name(call.params.get("QueueName")))
    attributes = read_attributes(name, call.mapping("Attributes"))
    if attributes.get("FifoQueue") == "false" and not name.endswith(FIFO_SUFFIX):
        # SQS itself refuses it; other implementations do not, and templates set it.
        del attributes["FifoQueue"]
    tags = _tags(call)
    if len(tags) > _MOST_TAGS:
        raise invalid_parameter(f"Too many tags added for queue {name}.")
    if name.endswith(FIFO_SUFFIX) != (attributes.get("FifoQueue") == "true"):
        raise invalid_parameter(
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end with "
            ".fifo suffix and be 1 to 80 in length."
        )
    catalog = call.backend.catalog
    existing = await catalog.find(name, fresh=True)
    if existing is None:
        call.require(Access.ADMIN)
        check_together(name, attributes)
        await _check_target(call, name, attributes)
        given = {attribute: value for attribute, value in attributes.items() if value}
        created = await catalog.create(name, given, tags)
        if created is not None:
            # A topic or queue of this name may have been there before, with messages. They are delivered: others that
            # create the queue at the same time may have sent to it already.
            await call.backend.store_of(created).configure(created)
            return {"QueueUrl": call.url_of(name)}
        existing = await catalog.find(name)
    if existing is None:
        raise SqsError(
            "ServiceUnavailable", f"The queue {name} is being created and deleted at the same time; try again."
        )
    shown = with_defaults(name, existing.attributes)
    for attribute, value in attributes.items():
        if value != shown.get(attribute, ""):
            raise SqsError(
                "QueueNameExists",
                f"A queue already exists with the same name and a different value for attribute {attribute}",
            )
    return {"QueueUrl": call.url_of(name)}


async def get_queue_url(call: Call) -> Answer:
    name = call.text("QueueName")
    try:
        return {"QueueUrl": call.url_of((await call.find(check_queue_name(name), fresh=True)).name)}
    except SqsError as error:
        if error.name == "InvalidParameterValueException":
            raise no_such_queue() from None
        raise


async def list_queues(call: Call) -> Answer:
    prefix = call.params.get("QueueNamePrefix") or ""
    if not isinstance(prefix, str) or "\0" in prefix:
        raise invalid_parameter("QueueNamePrefix must be the beginning of a queue's name.")
    catalog = call.backend.catalog
    return await _page(call, "QueueUrls", lambda after: catalog.names(prefix, after, _MOST_LISTED))


async def list_dead_letter_source_queues(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    catalog = call.backend.catalog
    return {
        "queueUrls": [],
        **await _page(call, "queueUrls", lambda after: catalog.sources(queue.name, after, _MOST_LISTED)),
    }


async def _page(call: Call, member: str, names_after: Callable[[str], Awaitable[list[str]]]) -> dict[str, Any]:
    """A page of queues, without those that the sender may not use."""
    limit = whole(call.params, "MaxResults", 1, _MOST_LISTED)
    after = _read_token(call)
    names: list[str] = []
    while len(names) <= (limit or _MOST_LISTED):
        found = await names_after(after)
        names += [name for name in found if call.admits(name)]
        if len(found) < _MOST_LISTED:
            break
        after = found[-1]
    shown = names[: limit or _MOST_LISTED]
    page: dict[str, Any] = {member: [call.url_of(name) for name in shown]} if shown else {}
    if limit is not None and len(names) > limit:
        page["NextToken"] = base64.urlsafe_b64encode(shown[-1].encode()).decode()
    return page


def _read_token(call: Call) -> str:
    token = call.params.get("NextToken")
    if not token:
        return ""
    try:
        return check_queue_name(base64.urlsafe_b64decode(str(token)).decode())
    except (binascii.Error, ValueError, SqsError):
        raise invalid_parameter("Invalid or expired NextToken.") from None


async def get_queue_attributes(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    names = call.texts("AttributeNames")
    for name in names:
        if name not in READABLE:
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {name[:80]}.")
    wanted = set(names)
    known = await _attributes(call, queue, counted=ALL in wanted or not wanted.isdisjoint(COUNTERS))
    shown = {name: value for name, value in known.items() if ALL in wanted or name in wanted}
    return {"Attributes": shown} if shown else _NOTHING


async def _attributes(call: Call, queue: SqsQueue, *, counted: bool) -> dict[str, str]:
    known = with_defaults(queue.name, queue.attributes)
    known["QueueArn"] = arn_of(queue.name, call.region)
    known["CreatedTimestamp"] = str(int(queue.created_at.timestamp()))
    known["LastModifiedTimestamp"] = str(int(queue.modified_at.timestamp()))
    if counted:
        counts = await call.backend.store_of(queue).counts(queue)
        known |= zip(COUNTERS, map(str, (counts.visible, counts.delayed, counts.hidden)), strict=True)
    return known


async def set_queue_attributes(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    sent = call.mapping("Attributes")
    if not sent:
        raise missing_parameter("Attribute.Name")
    attributes = read_attributes(queue.name, sent)
    if "FifoQueue" in attributes:
        raise SqsError("InvalidAttributeName", "The attribute FifoQueue can be set when a queue is created alone.")
    check_together(queue.name, {**queue.attributes, **attributes})
    await _check_target(call, queue.name, attributes)
    await call.backend.catalog.set_attributes(queue.name, attributes)
    changed = await call.find(queue.name, fresh=True)
    await call.backend.store_of(changed).configure(changed)
    return _NOTHING


async def _check_target(call: Call, name: str, attributes: Mapping[str, str]) -> None:
    """Raises `SqsError` for a redrive policy whose dead-letter queue is no queue for the sender or for this source."""
    policy = redrive_policy(attributes)
    if policy is None:
        return
    text = attributes["RedrivePolicy"]
    target = await call.backend.catalog.find(call.check_admitted(policy.target), fresh=True)
    if target is None:
        raise invalid_value(text, "RedrivePolicy", "Dead letter target does not exist.")
    if target.is_fifo != name.endswith(FIFO_SUFFIX):
        raise invalid_value(text, "RedrivePolicy", "Dead-letter queue must be same type of queue as the source.")
    if not allows_source(target.attributes, name):
        raise invalid_value(
            text, "RedrivePolicy", "The dead-letter queue does not allow this source (RedriveAllowPolicy)."
        )


async def delete_queue(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    await call.backend.catalog.delete(queue.name)
    await call.backend.store_of(queue).drop(queue)
    return _NOTHING


async def purge_queue(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    if not await call.backend.catalog.begin_purge(queue.name):
        raise SqsError(
            "PurgeQueueInProgress", f"Only one PurgeQueue operation on {queue.name} is allowed every 60 seconds."
        )
    await call.backend.store_of(queue).purge(queue)
    return _NOTHING


async def tag_queue(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    tags = _tags(call)
    if not tags:
        raise missing_parameter("Tags")
    if len({*queue.tags, *tags}) > _MOST_TAGS:
        raise invalid_parameter(f"Too many tags added for queue {queue.name}.")
    await call.backend.catalog.set_tags(queue.name, tags)
    return _NOTHING


async def untag_queue(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    keys = call.texts("TagKeys")
    if not all(1 <= len(key) <= 128 and "\0" not in key for key in keys or [""]):
        raise invalid_parameter("Tag keys must be between 1 and 128 characters in length.")
    await call.backend.catalog.set_tags(queue.name, {}, keys)
    return _NOTHING


async def list_queue_tags(call: Call) -> Answer:
    queue = await call.queue(fresh=True)
    return {"Tags": dict(queue.tags)} if queue.tags else _NOTHING


def _tags(call: Call) -> dict[str, str]:
    # The JSON protocol spells them in lower case for CreateQueue.
    sent = call.mapping("Tags") or call.mapping("tags")
    for key, value in sent.items():
        if not isinstance(value, str) or not 1 <= len(key) <= 128 or len(value) > 256:
            raise invalid_parameter(
                f"The tag {key[:128]!r} needs a key of 1 to 128 and a value of up to 256 characters."
            )
        if "\0" in key + value:
            raise invalid_parameter("Tags must not contain NUL.")
        if key.lower().startswith("aws:"):
            raise invalid_parameter(f"The tag {key[:128]!r} begins with aws:, which is reserved.")
    return sent


async def refuse_permission(call: Call) -> Answer:
    await call.queue(fresh=True)
    raise SqsError(
        "UnsupportedOperation",
        f"{call.name} is not supported: access is given to keys by QUEEN_SQS_KEYS, not by policies.",
    )


async def start_message_move_task(call: Call) -> Answer:
    source = await call.queue_of_arn("SourceArn")
    destination = await call.queue_of_arn("DestinationArn") if call.params.get("DestinationArn") else None
    if destination is not None:
        if destination.name == source.name:
            raise invalid_parameter("Source queue and destination queue must not be the same.")
        if destination.is_fifo != source.is_fifo:
            raise invalid_parameter("Source and destination must be queues of the same type.")
    per_second = whole(call.params, "MaxNumberOfMessagesPerSecond", 1, 500)
    return {"TaskHandle": await call.backend.moves.start(source, destination, per_second, call.check_admitted)}


async def cancel_message_move_task(call: Call) -> Answer:
    moves, handle = call.backend.moves, call.text("TaskHandle")
    call.check_admitted(await moves.source_of(handle))
    return {"ApproximateNumberOfMessagesMoved": await moves.cancel(handle)}


async def list_message_move_tasks(call: Call) -> Answer:
    source = await call.queue_of_arn("SourceArn")
    limit = whole(call.params, "MaxResults", 1, 10) or 1
    return {"Results": await call.backend.moves.list(source, limit, call.region)}


# CreateQueue requires the role of an administrator once it is known that there is no such queue.
QUEUE_ACTIONS: Final[Mapping[str, tuple[Access, Callable[[Call], Awaitable[Answer]]]]] = {
    "CreateQueue": (Access.READ_ONLY, create_queue),
    "GetQueueUrl": (Access.READ_ONLY, get_queue_url),
    "ListQueues": (Access.READ_ONLY, list_queues),
    "ListDeadLetterSourceQueues": (Access.READ_ONLY, list_dead_letter_source_queues),
    "GetQueueAttributes": (Access.READ_ONLY, get_queue_attributes),
    "SetQueueAttributes": (Access.ADMIN, set_queue_attributes),
    "DeleteQueue": (Access.ADMIN, delete_queue),
    "PurgeQueue": (Access.ADMIN, purge_queue),
    "TagQueue": (Access.ADMIN, tag_queue),
    "UntagQueue": (Access.ADMIN, untag_queue),
    "ListQueueTags": (Access.READ_ONLY, list_queue_tags),
    "AddPermission": (Access.ADMIN, refuse_permission),
    "RemovePermission": (Access.ADMIN, refuse_permission),
    "StartMessageMoveTask": (Access.ADMIN, start_message_move_task),
    "CancelMessageMoveTask": (Access.ADMIN, cancel_message_move_task),
    "ListMessageMoveTasks": (Access.READ_ONLY, list_message_move_tasks),
}
