"""Variables that look like settings and are none are pointed out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from queen.proxy.settings import ProxySettings
from queen.setting_hints import SUPERSEDED, environment_hints
from queen.settings import describe_settings

KNOWN = frozenset(item.variable for item in describe_settings())


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("DB_POOLSIZE", "there is no setting DB_POOLSIZE; did you mean DB_POOL_SIZE?"),
        ("QUEEN_ENCRYPTION_KEYS", "there is no setting QUEEN_ENCRYPTION_KEYS; did you mean QUEEN_ENCRYPTION_KEY?"),
        ("PG_PASSWORT_FILE", "there is no setting PG_PASSWORT_FILE; did you mean"),
        ("QUEEN_XYZZY", "there is no setting QUEEN_XYZZY"),
        ("DATABASE_URL", "there is no setting DATABASE_URL; did you mean DATABASE_URLS?"),
        ("NUM_WORKER", "there is no setting NUM_WORKER; did you mean NUM_WORKERS?"),
        ("CORS_ORIGIN_FILE", "there is no setting CORS_ORIGIN_FILE; did you mean CORS_ORIGINS?"),
        ("QUEEN_JWT_ENABLED", "there is no setting QUEEN_JWT_ENABLED; did you mean JWT_ENABLED?"),
        ("QUEEN_RENEW_MAX_HOLD_MS", "QUEEN_RENEW_MAX_HOLD_MS has no effect: requests are batched by group commit"),
        ("QUEEN_VEGAS_ALPHA", "QUEEN_VEGAS_ALPHA has no effect: requests are batched by group commit"),
        ("DB_KEEPALIVES_IDLE", "DB_KEEPALIVES_IDLE has no effect: a PostgreSQL that does not respond for DB_AWAY_MS"),
        ("SIDECAR_POOL_SIZE", "SIDECAR_POOL_SIZE has no effect: each worker opens up to DB_POOL_SIZE connections"),
    ],
)
def test_a_variable_that_is_no_setting_is_named_with_what_may_be_meant(variable: str, hint: str) -> None:
    (line,) = environment_hints({variable: "1"}, KNOWN)
    assert line.startswith(hint)


@pytest.mark.parametrize(
    "variable",
    [
        *("PATH", "HOME", "HOSTNAME", "LOGNAME", "REDIS_HOST", "MAIL_PORT", "OTEL_SDK_DISABLED"),
        *("DB_POOL_SIZE", "PG_PASSWORD_FILE", "DATABASE_URLS_FILE", "QUEEN_TOKEN"),
    ],
)
def test_settings_and_the_variables_of_others_are_left_alone(variable: str) -> None:
    assert list(environment_hints({variable: "1"}, KNOWN)) == []


def test_what_is_superseded_is_no_setting_and_its_replacement_is_one() -> None:
    assert not SUPERSEDED.keys() & KNOWN
    named = {word for text in SUPERSEDED.values() for word in re.findall(r"[A-Z]+(?:_[A-Z]+)+", text)}
    assert len(named) == 6
    assert named <= KNOWN


OF_EARLIER_SERVERS = [
    "BATCH_INSERT_SIZE",
    "DB_POOL_SIZE",
    "DEFAULT_SUBSCRIPTION_MODE",
    "FILE_BUFFER_DIR",
    "FILE_BUFFER_FLUSH_MS",
    "FILE_BUFFER_MAX_BATCH",
    "HOST",
    "JWT_ALGORITHM",
    "JWT_AUDIENCE",
    "JWT_ENABLED",
    "JWT_ISSUER",
    "JWT_JWKS_URL",
    "JWT_SECRET",
    "LOG_LEVEL",
    "NUM_WORKERS",
    "PARTITION_CLEANUP_DAYS",
    "PEER_NOTIFY_BATCH_MS",
    "PG_DB",
    "PG_HOST",
    "PG_PASSWORD",
    "PG_PORT",
    "PG_USER",
    "PG_USE_SSL",
    "POLL_DB_INTERVAL",
    "POLL_WORKER_COUNT",
    "POLL_WORKER_INTERVAL",
    "POP_WAIT_BACKOFF_MULTIPLIER",
    "POP_WAIT_BACKOFF_THRESHOLD",
    "POP_WAIT_INITIAL_INTERVAL_MS",
    "POP_WAIT_MAX_INTERVAL_MS",
    "PORT",
    "QUEEN_ACK_MAX_CONCURRENT",
    "QUEEN_ENCRYPTION_KEY",
    "QUEEN_PEERS",
    "QUEEN_POP_MAX_CONCURRENT",
    "QUEEN_PUSH_MAX_BATCH_SIZE",
    "QUEEN_PUSH_MAX_CONCURRENT",
    "QUEEN_PUSH_MAX_HOLD_MS",
    "QUEEN_PUSH_PREFERRED_BATCH_SIZE",
    "QUEEN_SYNC_ENABLED",
    "QUEEN_SYNC_SECRET",
    "QUEEN_UDP_NOTIFY_PORT",
    "QUEEN_UDP_PEERS",
    "QUEEN_VEGAS_BETA",
    "QUEEN_VEGAS_MAX_LIMIT",
    "QUEUE_MAX_POLL_INTERVAL",
    "RESPONSE_BATCH_MAX",
    "RESPONSE_BATCH_SIZE",
    "RESPONSE_TIMER_INTERVAL_MS",
    "RETENTION_INTERVAL",
    "SIDECAR_MAX_ITEMS_PER_TX",
    "SIDECAR_POOL_SIZE",
    "STREAM_CONCURRENT_CHECKS",
    "STREAM_MAX_POLL_INTERVAL",
    "STREAM_POLL_INTERVAL",
    "STREAM_POLL_WORKER_COUNT",
    "STREAM_POLL_WORKER_INTERVAL",
]
OF_EARLIER_PROXIES = [
    "EXTERNAL_AUDIENCE",
    "EXTERNAL_ISSUER",
    "EXTERNAL_JWKS_URL",
    "GOOGLE_ALLOWED_DOMAINS",
    "GOOGLE_AUTO_PROVISION",
    "GOOGLE_CLIENT_ID",
    "GOOGLE_CLIENT_SECRET",
    "GOOGLE_DEFAULT_ROLE",
    "GOOGLE_REDIRECT_URI",
    "JWT_EXPIRES_IN",
    "JWT_SECRET",
    "NODE_ENV",
    "PORT",
    "QUEEN_SERVER_URL",
]


@pytest.mark.parametrize("variable", OF_EARLIER_SERVERS)
def test_variables_of_earlier_servers_are_settings_or_named_with_what_replaced_them(variable: str) -> None:
    hints = list(environment_hints({variable: "1"}, KNOWN))
    assert [hint.startswith(f"{variable} has no effect: ") for hint in hints] == [True] * (variable not in KNOWN)


class Recorded(dict[str, str]):
    """An environment that knows which variables were read."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: object = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def test_variables_of_earlier_proxies_are_read_by_the_login_and_not_taken_for_mistakes() -> None:
    environment = Recorded(
        {
            "JWT_SECRET": "s" * 32,
            "GOOGLE_CLIENT_ID": "id",
            "GOOGLE_CLIENT_SECRET": "secret",
            "GOOGLE_REDIRECT_URI": "https://q/cb",
        }
    )
    ProxySettings.from_env(environment)
    assert set(OF_EARLIER_PROXIES) <= environment.read
    assert list(environment_hints(dict.fromkeys(OF_EARLIER_PROXIES, "1"), KNOWN)) == []
