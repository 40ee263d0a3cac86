"""Push items inside a larger body: read as they come, so that what is wrong can be said with its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from queen.errors import BadRequest
from queen.wire.push import DEFAULT_PARTITION, NULL, PushItem, check_items


class LooseItem(msgspec.Struct):
    """An item whose fields have not been looked at."""

    queue: Any = None
    partition: Any = DEFAULT_PARTITION
    payload: msgspec.Raw = NULL
    transaction_id: Any = msgspec.field(default="", name="transactionId")
    trace_id: Any = msgspec.field(default="", name="traceId")


def read_items(items: Sequence[LooseItem], where: str) -> list[PushItem]:
    """The items, each one valid. Raises `BadRequest` that says which is wrong, and how."""
    pushes = []
    for index, item in enumerate(items):
        for value, what, key in (
            (item.queue, "Queue", "queue"),
            (item.partition, "Partition", "partition"),
            (item.transaction_id, "TransactionId", "transactionId"),
            (item.trace_id, "TraceId", "traceId"),
        ):
            if not isinstance(value, str):
                raise BadRequest(f"{what} must be a string (at {where}[{index}].{key})")
        pushes.append(PushItem(item.queue, item.partition, item.payload, item.transaction_id, item.trace_id))
    check_items(pushes, where)
    return pushes
