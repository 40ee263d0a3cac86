"""Items to push, as they go to the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from queen.client.ids import TransactionIds
from queen.client.messages import Items

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)


def listed(items: Items) -> list[Mapping[str, Any]]:
    """One item or many, as a list; what cannot be an item is refused here, where its place is known."""
    # A list of dicts is what nearly everyone pushes, and asking an abstract class costs more than all the rest here.
    if type(items) is list and all(type(item) is dict for item in items):
        return items
    if isinstance(items, Mapping):
        return [items]
    if isinstance(items, str | bytes) or not hasattr(items, "__iter__"):
        raise TypeError(f"push takes a dict or a list of dicts like {{'data': ...}}, not {type(items).__name__}")
    items = list(items)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise TypeError(f"item {index} to push is no dict like {{'data': ...}} but {type(item).__name__}")
    return items


def wire_item(item: Mapping[str, Any], queue: str, partition: str | None, ids: TransactionIds) -> dict[str, Any]:
    """The item as the server takes it; its payload is `data`, else `payload`, else the item as a whole."""
    if "data" in item:
        payload = item["data"]
    elif "payload" in item:
        payload = item["payload"]
    else:
        payload = item
    formatted: dict[str, Any] = {
        "queue": queue,
        "payload": payload,
        "transactionId": item.get("transactionId") or ids.next(),
    }
    if partition is not None:
        formatted["partition"] = partition
    trace_id = item.get("traceId")
    if trace_id and isinstance(trace_id, str) and _UUID.fullmatch(trace_id):
        formatted["traceId"] = trace_id
    return formatted
