"""Variables that look like settings and are none are pointed out."""

from __future__ import annotations

import re

import pytest

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
    "variable", ["PATH", "HOME", "DB_POOL_SIZE", "PG_PASSWORD_FILE", "QUEEN_TOKEN", "OTEL_SDK_DISABLED"]
)
def test_settings_and_the_variables_of_others_are_left_alone(variable: str) -> None:
    assert list(environment_hints({variable: "1"}, KNOWN)) == []


def test_what_is_superseded_is_no_setting_and_its_replacement_is_one() -> None:
    assert not SUPERSEDED.keys() & KNOWN
    named = {word for text in SUPERSEDED.values() for word in re.findall(r"[A-Z]+(?:_[A-Z]+)+", text)}
    assert len(named) == 6
    assert named <= KNOWN
