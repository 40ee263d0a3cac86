"""Formats of what is printed."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
import yaml

from queen.cli.common.exits import UserError
from queen.cli.common.filters import message_filter
from queen.cli.common.output import Column, Output

ROWS: list[dict[str, Any]] = [
    {"name": "orders", "messages": {"pending": 4}, "on": True, "note": None},
    {"name": "a", "messages": {"pending": 12345}, "on": False, "note": "x, y"},
]
COLUMNS = (
    Column("NAME", "name"),
    Column("PENDING", "messages.pending", right=True),
    Column("ON", "on", wide=True),
    Column("NOTE", lambda row: row["note"], wide=True),
)


def printed(format_: str | None, **options: Any) -> str:
    out = io.StringIO()
    Output(format_, out=out, **options).rows(ROWS, COLUMNS, {"rows": ROWS})
    return out.getvalue()


def test_a_table_is_aligned_and_wide_shows_more_columns() -> None:
    assert printed("table") == "NAME    PENDING\norders        4\na         12345\n"
    assert printed("wide").splitlines()[1] == "orders        4  yes  -"
    assert printed("table", headers=False) == "orders      4\na       12345\n"


def test_other_formats_hold_the_rows_whole() -> None:
    assert msgspec.json.decode(printed("json")) == ROWS
    assert [msgspec.json.decode(line) for line in printed("ndjson").splitlines()] == ROWS
    assert printed("jsonl") == printed("ndjson")
    assert yaml.safe_load(printed("yaml")) == ROWS
    assert msgspec.json.decode(printed("raw")) == {"rows": ROWS}


def test_csv_quotes_what_needs_it() -> None:
    assert printed("csv").splitlines() == ["name,pending,on,note", "orders,4,yes,", 'a,12345,no,"x, y"']


def test_csv_leaves_out_what_is_empty() -> None:
    out = io.StringIO()
    Output("csv", out=out).rows([{"name": "orders", "namespace": ""}], (COLUMNS[0], Column("NAMESPACE", "namespace")))
    assert out.getvalue() == "name,namespace\norders,\n"


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        (".rows[0].name", ["orders"]),
        ("{.rows[*].messages.pending}", ["4", "12345"]),
        (".rows[-1].name", ["a"]),
        (".rows[9].name", []),
        (".rows[0].messages", ['{"pending":4}']),
    ],
)
def test_jsonpath_picks_from_the_whole_answer(path: str, lines: list[str]) -> None:
    assert printed(f"jsonpath={path}").splitlines() == lines


def test_formats_that_do_not_exist_are_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"no output format 'xml'; there is table"):
        Output("xml")
    with pytest.raises(UserError, match="cannot be read"):
        printed("jsonpath=.rows[")


def test_without_a_terminal_the_format_is_json_and_there_are_no_colours() -> None:
    assert printed(None) == printed("json")
    assert "\033" not in printed("table")
    assert "\033[1mNAME" in printed("table", color=True)


def test_conditions_on_data() -> None:
    message = {"data": {"total": 120, "customer": {"id": 42, "name": "Ada"}, "ok": True}}

    def holds(*where: str, grep: str | None = None) -> bool:
        return message_filter(where, grep)(message)

    assert holds("total>100", "customer.id=42", "customer.name=Ada", "ok=true", "customer.name~^A")
    assert not holds("total<100")
    assert not holds("customer.id!=42")
    assert holds("missing!=1")
    assert not holds("missing>1")
    assert not holds("customer.name>5")
    assert holds(grep='"id":4\\d')
    with pytest.raises(UserError, match="is none of path=value"):
        message_filter(["total"], None)
    with pytest.raises(UserError, match="not a regular expression"):
        message_filter(None, "(")
