"""The examples of docs/streams.md do what the page says."""

from __future__ import annotations

import ast
import re
import time
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from queen.streams import Runner
from tests.api import Api
from tests.faults.load import until
from tests.streams.collecting import drain

_PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
_EXAMPLE = re.compile(r"<!-- example: (\w+) -->\n```python\n(.*?)```", re.DOTALL)


async def start(api: Api, name: str) -> Runner:
    """Run an example as it stands on the page, but for the address of the server."""
    (text,) = (text for found, text in _EXAMPLE.findall(_PAGE.read_text()) if found == name)
    text = text.replace("http://localhost:6632", api.url)
    code: CodeType = compile(text, f"{_PAGE}:{name}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {}
    await eval(code, names)
    runner = names["runner"]
    assert isinstance(runner, Runner)
    return runner


async def test_totals_per_minute(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.push("orders", *({"customer": "ann", "total": total} for total in (5, 7)))
    runner = await start(api, "totals")
    await until(lambda: runner.metrics()["messagesTotal"] == 2)
    # Two minutes later, as far as this program can tell.
    later = time.time() + 120
    monkeypatch.setattr("queen.streams.records.time.time", lambda: later)
    (totals,) = await drain(api, "order-totals", 1)
    await runner.stop()
    assert (totals["customer"], totals["count"], totals["sum"]) == ("ann", 2, 12)


async def test_alerts_of_sensors(api: Api) -> None:
    readings = [(0, 20), (25_000, 35), (50_000, 28), (10_000_000, 0)]
    await api.push("readings", *({"sensor": "s1", "at": at, "celsius": celsius} for at, celsius in readings))
    runner = await start(api, "sensors")
    alerts = await drain(api, "alerts", 3)
    await runner.stop()
    assert {alert["from"]: alert["max"] for alert in alerts} == {
        "1969-12-31T23:59:40.000Z": 35,
        "1970-01-01T00:00:00.000Z": 35,
        "1970-01-01T00:00:20.000Z": 35,
    }


async def test_a_polite_mailer(api: Api) -> None:
    await api.push("mails", *({"domain": "example.com", "n": n} for n in range(120)))
    runner = await start(api, "limit")
    sent = await drain(api, "mails-to-send", 100)
    await runner.stop()
    assert [mail["n"] for mail in sent][:100] == list(range(100))


async def test_the_first_three(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    await api.push("samples", *({"customer": "ann", "n": n} for n in range(5)))
    runner = await start(api, "gate")
    await until(lambda: runner.metrics()["gateDenialsTotal"] > 0)
    await runner.stop()
    assert capsys.readouterr().out.count("'customer': 'ann'") == 3


def test_every_example_is_tested() -> None:
    assert {name for name, _ in _EXAMPLE.findall(_PAGE.read_text())} == {"totals", "sensors", "limit", "gate"}
    assert _PAGE.read_text().count("```python") == 4
