"""Names in a path or a query: of queues, partitions, groups, namespaces and tasks."""

from __future__ import annotations

from typing import Final

from queen.http.message import Request
from queen.wire.push import check_name

_KINDS: Final = {"group": "ConsumerGroup"}


def path_name(request: Request, key: str) -> str:
    """The name at `{key}` of the route. Raises `BadRequest` when nothing can be called like this."""
    name = request.params[key]
    check_name(name, _kind(key), f"<{key}> in the path")
    return name


def query_name(request: Request, key: str) -> str:
    """The name that the query gives for `key`; empty when it gives none."""
    name = request.query.get(key, "")
    if name:
        check_name(name, _kind(key), key)
    return name


def _kind(key: str) -> str:
    return _KINDS.get(key, key.capitalize())
