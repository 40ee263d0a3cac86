"""The URLs of servers are those of the source as well."""

from __future__ import annotations

import re

import pytest
from psycopg.conninfo import conninfo_to_dict

from queen.errors import DatabaseUnavailable
from queen.spark.source.connections import conninfo
from queen.spark.source.logs import ShardLog


def test_several_hosts_with_their_ports_are_read_as_a_server_reads_them() -> None:
    url = "postgresql://queen:secret@/orders?host=pg-1%3A5432%2Cpg-2%3A5433&target_session_attrs=primary"
    assert conninfo_to_dict(conninfo(url)) == {
        "user": "queen",
        "password": "secret",
        "dbname": "orders",
        "host": "pg-1,pg-2",
        "port": "5432,5433",
        "target_session_attrs": "primary",
    }


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://queen@db:5432/orders",
        "postgresql://queen@pg-1:5432,pg-2:5433/orders?target_session_attrs=primary",
        "postgresql://queen@/orders?host=/tmp/socket&port=5433",
        "postgresql://queen@/orders?host=%3A%3A1",
        "postgresql:///orders",
    ],
)
def test_what_libpq_reads_is_left_as_it_is(url: str) -> None:
    assert conninfo(url) == url


@pytest.mark.parametrize("place", ["127.0.0.1:1", "127.0.0.1:1,127.0.0.1:2"])
def test_a_postgresql_that_is_unavailable_is_named_in_one_line(place: str) -> None:
    with pytest.raises(DatabaseUnavailable) as raised:
        ShardLog((f"postgresql://me@{place}/none",)).positions(["orders"])
    assert re.fullmatch(r"PostgreSQL at 127\S+/none is unavailable: .*Connection refused", str(raised.value))
