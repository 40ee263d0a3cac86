"""What the client tells about itself."""

from __future__ import annotations

import re

import pytest

from queen import Queen
from tests.support.api import Api

LINE = re.compile(r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\] \[(INFO|WARN)\] \[[\w.]+\] \{.*\}")


async def test_every_step_is_printed_when_the_variable_says_so(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUEEN_CLIENT_LOG", "true")
    async with Queen(api.url) as queen:
        await queen.queue("tasks").push([{"data": n} for n in range(5)])
        await queen.ack(await queen.queue("tasks").batch(5).pop())
        await queen.ack("no message")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert all(LINE.fullmatch(line) for line in [*lines, *printed.err.splitlines()])
    assert '[INFO] [Queen.constructor] {"status":"initialized","urls":1}' in lines[0]
    assert any('[QueueBuilder.push] {"queue":"tasks","partition":"Default","count":5}' in line for line in lines)
    assert any('[Queen.ack] {"count":5,"status":true}' in line for line in lines)
    assert "[WARN] [Queen.ack]" in printed.err


async def test_nothing_is_printed_otherwise_and_warnings_are_logged(
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("QUEEN_CLIENT_LOG", raising=False)
    async with Queen(api.url) as queen:
        await queen.queue("tasks").push({"data": 1})
        await queen.ack("no message")
    assert capsys.readouterr() == ("", "")
    assert [record.name for record in caplog.records] == ["queen.client"]
    assert "partitionId" in caplog.text


def test_token_is_never_shown() -> None:
    queen = Queen("http://localhost", bearer_token="secret", headers={"X-Key": "hidden"})
    shown = repr(queen) + repr(vars(queen)) + repr(queen.engine.config)
    assert "secret" not in shown and "hidden" not in shown
