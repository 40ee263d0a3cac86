"""Descriptions of the description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from queen.http.openapi.operation import Media, Operation

OPERATIONS: Final[Mapping[str, Operation]] = {
    "GET /openapi.json": Operation(
        id="openapi",
        summary="This document",
        tag="Documentation",
        answers={200: dict[str, Any]},
    ),
    "GET /docs": Operation(
        id="docs",
        summary="This document as a page",
        tag="Documentation",
        answers={200: Media("text/html")},
    ),
}
