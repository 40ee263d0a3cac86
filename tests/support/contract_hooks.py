"""Hooks of schemathesis for this server."""

from __future__ import annotations

from typing import Any

import schemathesis

_LONGEST_WAIT_MS = 20


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """A pop that waits is as good a test after a moment as after a minute, and so is a stream."""
    if case.query and "wait" in case.query:
        case.query["timeout"] = _LONGEST_WAIT_MS
    if case.path == "/api/v1/events":
        case.query = {**(case.query or {}), "limit": 1}
