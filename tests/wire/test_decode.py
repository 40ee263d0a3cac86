"""What is answered to a body that is not of its kind."""

from __future__ import annotations

import pytest

from queen.errors import BadRequest
from queen.wire.decode import decoder
from queen.wire.fields import Body


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
