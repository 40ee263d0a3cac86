"""Holds every answer that a test gets to the description of its route."""

from __future__ import annotations

from typing import Any

import msgspec

from queen.http.openapi.document import refusals, route_key
from queen.http.openapi.operation import Error, Media
from queen.http.operations import all_operations
from queen.http.server.router import Router

_OPERATIONS = all_operations()


def check_conformance(router: Router, method: str, target: str, status: int, body: bytes) -> None:
    """Raises AssertionError when the answer is none that the description of the route knows."""
    route = router.match(method.encode(), target.encode()).route
    if route is None or route_key(route) not in _OPERATIONS:
        return
    operation = _OPERATIONS[route_key(route)]
    if status in operation.answers:
        kind = operation.answers[status]
    elif status in refusals(route, operation):
        kind = Error
    else:
        raise AssertionError(f"{route_key(route)} answered {status}, which its description does not know: {body!r}")
    if method == "HEAD" or isinstance(kind, Media):
        return
    if kind is None:
        assert not body, f"{route_key(route)} answered {status} with a body, which its description says has none"
        return
    _check_body(route_key(route), status, body, kind)


def _check_body(where: str, status: int, body: bytes, kind: Any) -> None:
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise AssertionError(
            f"{where} answered {status} with a body that is not what src/queen/http/operations says: {error}: {body!r}"
        ) from error
