"""What is used where nothing is said. Names in `…_millis` are milliseconds; other times are seconds."""

from __future__ import annotations

from typing import Any, Final

CLIENT_DEFAULTS: Final[dict[str, Any]] = {
    "timeout_millis": 30_000,
    "retry_attempts": 3,
    "retry_delay_millis": 1_000,
    "load_balancing_strategy": "affinity",
    "affinity_hash_ring": 128,
    "enable_failover": True,
    "health_retry_after_millis": 5_000,
    "bearer_token": None,
    "headers": {},
    "strict": False,
    "handle_signals": True,
}

QUEUE_DEFAULTS: Final[dict[str, Any]] = {
    "lease_time": 300,
    "retry_limit": 3,
    "priority": 0,
    "delayed_processing": 0,
    "window_buffer": 0,
    "max_size": 0,
    "retention_seconds": 0,
    "completed_retention_seconds": 0,
    "encryption_enabled": False,
}

CONSUME_DEFAULTS: Final[dict[str, Any]] = {
    "concurrency": 1,
    "batch": 1,
    "auto_ack": True,
    "wait": True,
    "timeout_millis": 30_000,
    "limit": None,
    "idle_millis": None,
    "renew_lease": False,
    "renew_lease_interval_millis": None,
    "subscription_mode": None,
    "subscription_from": None,
}

POP_DEFAULTS: Final[dict[str, Any]] = {
    "batch": 1,
    "wait": True,
    "timeout_millis": 30_000,
    "auto_ack": False,
}

BUFFER_DEFAULTS: Final[dict[str, Any]] = {
    "message_count": 100,
    "time_millis": 1_000,
    "max_messages": 10_000,
    "max_bytes": 64 * 1024 * 1024,
}
