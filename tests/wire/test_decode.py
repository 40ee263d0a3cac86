"""What is answered to a body that is not of its kind."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import pytest

from queen.errors import BadRequest
from queen.wire.decode import decoder
from queen.wire.fields import Body
from queen.wire.topics.requests import decode_names


class _Tree(Body):
    leaves: dict[str, dict[str, int]]
    rows: list[list[int]]


@pytest.mark.parametrize(
    ("leaves", "rows", "error"),
    [
        ("1", "[]", "leaves must be an object, not a whole number (at leaves)"),
        ('{"a":1}', "[]", "leaves[...] must be an object, not a whole number (at leaves[...])"),
        ('{"a":{"b":"c"}}', "[]", "leaves[...][...] must be a whole number, not a string (at leaves[...][...])"),
        ("{}", '[[1],[2,"3"]]', "rows[1][1] must be a whole number, not a string (at rows[1][1])"),
    ],
)
def test_the_error_begins_with_what_is_wrong(leaves: str, rows: str, error: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decoder(_Tree)(f'{{"leaves":{leaves},"rows":{rows}}}'.encode())
    assert str(refused.value) == error


class _Colour(Enum):
    RED = "red"
    BLUE = "blue"


class _Get(Body, tag_field="op", tag="get"):
    pass


class _Put(Body, tag_field="op", tag="put"):
    colour: _Colour | None = None
    size: Literal["s", "m"] = "s"


class _Operations(Body):
    operations: list[_Get | _Put]


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ('{"op":"zap"}', "op must be one of get, put, not 'zap' (at operations[0].op)"),
        ('{"op":"put","colour":"green"}', "colour must be one of red, blue, not 'green' (at operations[0].colour)"),
        ('{"op":"put","size":"xl"}', "size must be one of m, s, not 'xl' (at operations[0].size)"),
    ],
)
def test_a_value_that_is_no_choice_is_answered_with_the_choices(operation: str, error: str) -> None:
    with pytest.raises(BadRequest) as refused:
        decoder(_Operations)(f'{{"operations":[{operation}]}}'.encode())
    assert str(refused.value) == error


def test_a_parameter_that_is_not_json_is_named() -> None:
    with pytest.raises(BadRequest, match=r"^Invalid JSON: .* \(at topics\)$"):
        decode_names("news")
