"""Times as clients see them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from queen.wire.times import iso_micros, iso_millis, iso_seconds, parse_time


@pytest.mark.parametrize("year", [1, 251, 1999, 2026, 9999])
def test_years_have_four_digits_and_times_are_read_back(year: int) -> None:
    moment = datetime(year, 5, 9, 13, 0, 7, 123_456, UTC)
    assert iso_micros(moment) == f"{year:04d}-05-09T13:00:07.123456Z"
    assert iso_millis(moment) == f"{year:04d}-05-09T13:00:07.123Z"
    assert iso_seconds(moment) == f"{year:04d}-05-09T13:00:07Z"
    assert parse_time(iso_micros(moment)) == moment


def test_other_zones_are_shown_in_utc() -> None:
    moment = datetime(2026, 5, 9, 13, 0, tzinfo=timezone(timedelta(hours=2)))
    assert iso_millis(moment) == "2026-05-09T11:00:00.000Z"
    assert iso_millis(None) is None
