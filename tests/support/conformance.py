"""Holds every answer that a test gets to the declaration of its route."""

from __future__ import annotations

from typing import Any

import msgspec

from queen.http.routing.document import refusals
from queen.http.routing.route import Media, Operation
from queen.http.server.router import Router
from queen.wire.fields import Error


def check_conformance(router: Router, method: str, target: str, status: int, body: bytes) -> None:
    """Raises AssertionError when the answer is none that the declaration of the route knows."""
    route = router.match(method.encode(), target.encode()).route
    if route is None or route.declaration is None:
        return
    operation: Operation = route.declaration
    if status in operation.returns:
        kind = operation.returns[status]
    elif status in refusals(route, operation):
        kind = Error
    else:
        raise AssertionError(f"{operation.key} answered {status}, which its declaration does not know: {body!r}")
    if method == "HEAD" or isinstance(kind, Media):
        return
    if kind is None:
        assert not body, f"{operation.key} answered {status} with a body, which its declaration says has none"
        return
    _check_body(operation.key, status, body, kind)


def _check_body(where: str, status: int, body: bytes, kind: Any) -> None:
    try:
        msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise AssertionError(
            f"{where} answered {status} with a body that is not what its declaration says: {error}: {body!r}"
        ) from error
