"""Times and durations as people type them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import typer

from queen.cli.common.times import BEGINNING, age, iso, parse_duration, parse_time

NOW = datetime(2026, 4, 26, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-04-26T10:59:28Z", datetime(2026, 4, 26, 10, 59, 28, tzinfo=UTC)),
        ("2026-04-26T12:59:28+02:00", datetime(2026, 4, 26, 10, 59, 28, tzinfo=UTC)),
        ("2026-04-26 10:59:28", datetime(2026, 4, 26, 10, 59, 28, tzinfo=UTC)),
        ("2026-04-26T10:59", datetime(2026, 4, 26, 10, 59, tzinfo=UTC)),
        ("2026-04-26", datetime(2026, 4, 26, tzinfo=UTC)),
        ("1777201168", datetime(2026, 4, 26, 10, 59, 28, tzinfo=UTC)),
        ("1777201168000", datetime(2026, 4, 26, 10, 59, 28, tzinfo=UTC)),
        ("now", NOW),
        ("latest", NOW),
        ("beginning", BEGINNING),
        ("Earliest", BEGINNING),
        ("5m", NOW - timedelta(minutes=5)),
        ("5m ago", NOW - timedelta(minutes=5)),
        ("1h30m ago", NOW - timedelta(minutes=90)),
        ("1d", NOW - timedelta(days=1)),
        ("1w", NOW - timedelta(weeks=1)),
    ],
)
def test_a_time_can_be_written_in_many_ways(text: str, moment: datetime) -> None:
    assert parse_time(text, NOW) == moment


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "5 parsecs",
        "2026-13-01",
        "m5",
        "1h-5m",
        f"{10**12}d",
        "9" * 400 + "h",
        "9999-12-31T23:59:59-23:00",
    ],
)
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="try 2026-04-26T"):
        parse_time(text, NOW)


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("10", 10), ("2.5s", 2.5), ("1h30m", 5400), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["soon", "", "-5", "-1s", "nan", "inf", "1e400", "9" * 400, "9" * 400 + "d", "101000w"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="500ms"):
        parse_duration(text)


def test_ages_are_short() -> None:
    assert [age(seconds) for seconds in (None, 5, 65, 3700, 90000)] == ["-", "5s", "1m05s", "1h01m", "1d1h"]
    assert iso(NOW) == "2026-04-26T12:00:00Z"
