"""The heartbeat of PostgreSQL judges PostgreSQL, and not the event loop that it lives on."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.conftest import StartServer


def keep_the_loop_busy() -> None:
    time.sleep(0.5)


async def test_a_late_event_loop_does_not_take_postgresql_for_dead(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_server(db_away_ms=200)
    assert api.worker is not None
    broker = api.worker.broker
    went_down: list[str] = []
    mark_down = broker.database.mark_down

    def note(reason: str) -> None:
        went_down.append(reason)
        mark_down(reason)

    monkeypatch.setattr(broker.database, "mark_down", note)
    for turns in range(1, 12):
        broker.heartbeat.trigger()
        # So many turns of the loop bring the beat as far as it comes: asked, and not answered yet.
        for _ in range(turns):
            await asyncio.sleep(0)
        keep_the_loop_busy()
    await api.push("q", 1)
    assert went_down == []
