"""The first example of docs/streams.md emits its window when the minute is over."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from queen.streams import Runner
from tests.docs.snippets import snippets
from tests.streams.collecting import drain
from tests.support.ageing import until
from tests.support.api import Api

_PAGE = Path(__file__).parents[2] / "docs" / "streams.md"


async def start_first_example(api: Api) -> Runner:
    """Run the example as it stands on the page, but for the address of the server."""
    text = next(snippets(_PAGE)).code.replace("http://localhost:6632", api.url)
    code: CodeType = compile(text, str(_PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {}
    await eval(code, names)
    runner = names["runner"]
    assert isinstance(runner, Runner)
    return runner


async def test_totals_per_minute(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.push("store-orders", *({"customer": "ann", "total": total} for total in (5, 7)))
    runner = await start_first_example(api)
    await until(lambda: runner.metrics()["messagesTotal"] == 2)
    later = time.time() + 120
    monkeypatch.setattr("queen.streams.records.time.time", lambda: later)
    (totals,) = await drain(api, "store-totals", 1)
    await runner.stop()
    assert (totals["customer"], totals["count"], totals["sum"]) == ("ann", 2, 12)
