"""The options of a queue: their names on the wire, their types, their defaults, and what is wrong with a bad one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from queen.broker.catalog import Queue
from queen.errors import BadRequest

OptionValue: TypeAlias = int | bool | None

_LARGEST_INT = 2**31 - 1
_LARGEST_BIGINT = 2**63 - 1
_LONGEST_SHOWN = 80
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,30}\s*", re.ASCII)
_FLAGS = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `default` is what is stored when it is not sent; `shown` what is echoed in place of null."""

    name: str
    column: str
    default: OptionValue
    unit: str = ""
    largest: int = _LARGEST_INT
    shown: OptionValue = None

    @property
    def expected(self) -> str:
        if isinstance(self.default, bool):
            return "true or false"
        return f"a whole number{self.unit and f' of {self.unit}'} from 0 to {self.largest}"

    def read(self, value: object) -> OptionValue:
        """The value to store; a number may come as text, null stands for the default."""
        if value is None:
            return self.default
        found = _flag(value) if isinstance(self.default, bool) else _whole(value)
        if found is None or not 0 <= found <= self.largest:
            raise BadRequest(
                f"option {self.name} must be {self.expected}, not {_shown(value)} (at options.{self.name})"
            )
        return found

    def echo(self, queue: Queue) -> OptionValue:
        stored: OptionValue = getattr(queue, self.column)
        return self.shown if stored is None else stored


# In the order in which they are echoed, which is also that of the parameters of `configure_queue`.
OPTIONS: tuple[Option, ...] = (
    Option("priority", "priority", 0),
    Option("leaseTime", "lease_time", 300, "seconds"),
    Option("retryLimit", "retry_limit", 3),
    Option("retryDelay", "retry_delay", 1000, "milliseconds"),
    Option("maxSize", "max_size", 0, "messages", largest=_LARGEST_BIGINT),
    # Messages expire only where somebody asked for it, though clients are told the default they know.
    Option("ttl", "ttl", None, "seconds", shown=3600),
    Option("deadLetterQueue", "dead_letter_queue", False),
    Option("dlqAfterMaxRetries", "dlq_after_max_retries", False),
    Option("delayedProcessing", "delayed_processing", 0, "seconds"),
    Option("windowBuffer", "window_buffer", 0, "seconds"),
    Option("retentionSeconds", "retention_seconds", 0, "seconds"),
    Option("completedRetentionSeconds", "completed_retention_seconds", 0, "seconds"),
    Option("retentionEnabled", "retention_enabled", False),
    Option("encryptionEnabled", "encryption_enabled", False),
    Option("maxWaitTimeSeconds", "max_wait_time_seconds", 0, "seconds"),
    Option("dedupWindowSeconds", "dedup_window_seconds", None, "seconds"),
)


def read_options(sent: object) -> list[OptionValue]:
    """What to store for each of `OPTIONS`; unknown options are ignored. Raises `BadRequest` for the first bad one."""
    if sent is None:
        sent = {}
    if not isinstance(sent, Mapping):
        raise BadRequest(f"options must be an object, not {_shown(sent)} (at options)")
    return [option.read(sent.get(option.name)) for option in OPTIONS]


def echo_options(queue: Queue) -> dict[str, OptionValue]:
    """The options of a queue as clients are told them."""
    return {option.name: option.echo(queue) for option in OPTIONS}


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    return None


def _flag(value: object) -> bool | None:
    if isinstance(value, str):
        return _FLAGS.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"
