"""The options of `df.write.format("queen")` and `df.writeStream.format("queen")`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from queen.errors import BadRequest, SettingsError
from queen.spark.options import Access, check_known, parse_access
from queen.wire.push import check_name
from queen.wire.stages import LARGEST_BATCH

_WRITING: Final = (
    "queue",
    "path",
    "partition",
    "namespace",
    "topic",
    "run",
    "batch",
    "dedupWindowSeconds",
    # Spark passes these on with the others.
    "checkpointLocation",
    "queryName",
)
_DEDUP_WINDOW_SECONDS: Final = 3600


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where rows go. What is None is taken from the column of that name."""

    access: Access
    queue: str | None
    partition: str | None
    namespace: str | None
    topic: str | None
    run: str | None
    batch: int
    dedup_window: float


def parse_write_options(options: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> WriteOptions:
    """Raises `SettingsError` that says which option is wrong, and how it is written."""
    check_known(options, _WRITING)
    given = {name.lower(): value for name, value in options.items() if value}
    if "queue" in given and ("topic" in given or "namespace" in given):
        raise SettingsError("give either queue, or namespace and topic: a write goes to queues or to topics")
    if "batch" in given and "run" not in given:
        raise SettingsError("batch numbers the writes of a run: give option run, which names it, as well")
    return WriteOptions(
        access=parse_access(options, environment),
        queue=_name(given, "queue") or _name(given, "path"),
        partition=_name(given, "partition"),
        namespace=_name(given, "namespace"),
        topic=_name(given, "topic"),
        run=_name(given, "run"),
        batch=_whole(given, "batch", 0, LARGEST_BATCH),
        dedup_window=float(
            _whole(
                given,
                "dedupWindowSeconds",
                int(environment.get("DEDUP_WINDOW_SECONDS", "") or _DEDUP_WINDOW_SECONDS),
                1 << 31,
            )
        ),
    )


def _name(given: Mapping[str, str], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        check_name(value, name.capitalize(), f"option {name}")
    except BadRequest as error:
        raise SettingsError(str(error)) from error
    return value


def _whole(given: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = given.get(name.lower())
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise SettingsError(f"{name} must be a whole number from 0 to {most}, not {text!r}")
    return int(text)
