"""Hints about environment variables that are not settings: misspelt ones, and those of other Queen servers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

_BATCHING: Final = "requests are batched by group commit, which needs no tuning"
_WAKING: Final = "waiting pops are woken by notifications; POP_SAFETY_POLL_MS is the interval of the safety poll"
_POOL: Final = "each worker opens up to DB_POOL_SIZE connections, on demand"
_SILENT: Final = (
    "a PostgreSQL that does not respond for DB_AWAY_MS counts as unavailable, and its connections are closed"
)
_LIVE: Final = "statistics are read live; STATS_CACHE_MS is how long an expensive view is reused"

SUPERSEDED: Final[Mapping[str, str]] = {
    "POLL_WORKER_COUNT": _WAKING,
    "POLL_WORKER_INTERVAL": _WAKING,
    "POLL_DB_INTERVAL": _WAKING,
    "QUEUE_MAX_POLL_INTERVAL": _WAKING,
    "STREAM_POLL_WORKER_COUNT": _WAKING,
    "STREAM_POLL_WORKER_INTERVAL": _WAKING,
    "STREAM_POLL_INTERVAL": _WAKING,
    "STREAM_CONCURRENT_CHECKS": _WAKING,
    "STREAM_MAX_POLL_INTERVAL": _WAKING,
    "POP_WAIT_INITIAL_INTERVAL_MS": _WAKING,
    "POP_WAIT_BACKOFF_THRESHOLD": _WAKING,
    "POP_WAIT_BACKOFF_MULTIPLIER": _WAKING,
    "POP_WAIT_MAX_INTERVAL_MS": _WAKING,
    "SIDECAR_POOL_SIZE": _POOL,
    "DB_IDLE_TIMEOUT": _POOL,
    "DB_TCP_USER_TIMEOUT_MS": _SILENT,
    "DB_KEEPALIVES_IDLE": _SILENT,
    "DB_KEEPALIVES_INTERVAL": _SILENT,
    "DB_KEEPALIVES_COUNT": _SILENT,
    "WORKER_ID": "workers are numbered by themselves; NUM_WORKERS is how many there are",
    "SIDECAR_MICRO_BATCH_WAIT_MS": _BATCHING,
    "SIDECAR_MAX_ITEMS_PER_TX": _BATCHING,
    "BATCH_INSERT_SIZE": _BATCHING,
    "QUEEN_CONCURRENCY_MODE": _BATCHING,
    "RESPONSE_BATCH_SIZE": _BATCHING,
    "RESPONSE_BATCH_MAX": _BATCHING,
    "RESPONSE_TIMER_INTERVAL_MS": _BATCHING,
    "STATS_INTERVAL_MS": _LIVE,
    "STATS_RECONCILE_INTERVAL_MS": _LIVE,
    "QUEEN_RETENTION_INTERVAL_MS": "RETENTION_INTERVAL",
    "WEBAPP_ROOT": "the dashboard is part of the package",
}
"""Variables of earlier servers, and what replaces them."""

_OF_BATCHES: Final = re.compile(
    r"QUEEN_[A-Z_]+_(?:PREFERRED_BATCH_SIZE|MAX_BATCH_SIZE|MAX_HOLD_MS|MAX_CONCURRENT)|QUEEN_VEGAS_[A-Z_]+"
)
"""Variables of earlier servers for each kind of request."""

_PREFIXES: Final = (
    "QUEEN_",
    "PG_",
    "DB_",
    "POP_",
    "JWT_",
    "TLS_",
    "FILE_BUFFER_",
    "WAL_",
    "DEDUP_",
    "RETENTION_",
    "EVICTION_",
    "NAMESPACE_",
    "METRICS_",
    "STATS_",
    "PEER_",
)
_NOT_OF_THE_SERVER: Final = frozenset(
    {
        "QUEEN_CLIENT_LOG",
        "QUEEN_CONFIG",
        "QUEEN_CONTEXT",
        "QUEEN_SERVER",
        "QUEEN_SERVER_URL",
        "QUEEN_TOKEN",
        "QUEEN_URL",
    }
)
_ALIKE: Final = 0.75
_NEARLY_EQUAL: Final = 0.9
"""For variables of any prefix, most of which belong to other programs."""


def environment_hints(environ: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """One line for each variable that looks like a setting and is not; `known` are the names of the settings."""
    for name in sorted(environ.keys() - set(known) - _NOT_OF_THE_SERVER):
        plain = name.removesuffix("_FILE")
        if name in SUPERSEDED:
            yield f"{name} has no effect: {SUPERSEDED[name]}"
        elif _OF_BATCHES.fullmatch(name):
            yield f"{name} has no effect: {_BATCHING}"
        elif plain in known or name.startswith("OTEL_"):
            continue
        elif name.startswith(_PREFIXES):
            # Half of the settings begin with QUEEN_, and half do not.
            others = {plain.removeprefix("QUEEN_"), f"QUEEN_{plain}"} - {plain}
            nearest = sorted(others & set(known)) or difflib.get_close_matches(plain, known, 1, _ALIKE)
            yield f"there is no setting {name}" + (f"; did you mean {nearest[0]}?" if nearest else "")
        else:
            # Such as DATABASE_URL and NUM_WORKER. Those that differ much in length cannot be nearly equal.
            comparable = [one for one in known if abs(len(one) - len(plain)) <= 3]
            for setting in difflib.get_close_matches(plain, comparable, 1, _NEARLY_EQUAL):
                yield f"there is no setting {name}; did you mean {setting}?"
