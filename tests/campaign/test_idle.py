"""When a consumer of the campaign may end."""

from __future__ import annotations

from typing import cast

from tests.campaign.history import History, Outcome
from tests.campaign.site import Site
from tests.campaign.workload import IDLE_SECONDS, Idle, Stage
from tests.campaign.workloads.websocket import WebSocketWorkload
from tests.conftest import StartServer
from tests.support.consumer import consuming
from tests.support.proxy import Proxy


def test_a_consumer_that_was_cut_off_asks_again_before_it_ends() -> None:
    history = History()
    stage = Stage(cast(Site, None), history, seed=1)
    idle = Idle(stage)

    def asked(after: float, got: object = None, outcome: Outcome = Outcome.OK) -> bool:
        history.origin -= after
        idle.note(history.end(history.begin("consumer", "pop", {}), outcome), got)
        return idle.long_enough

    long = IDLE_SECONDS + 1
    assert not asked(long), "there are faults"
    stage.healed.set()
    history.origin -= 10 * long
    assert not idle.long_enough, "it has not asked since"
    assert not asked(0), "it has asked once"
    assert not asked(long, outcome=Outcome.UNKNOWN)
    assert not asked(long)
    assert not asked(long, got=["message"])
    assert not asked(long)
    assert asked(long)


async def test_a_consumer_whose_subscription_is_refused_has_not_asked(start_server: StartServer, proxy: Proxy) -> None:
    history = History()
    workload = WebSocketWorkload(Stage(cast(Site, None), history, seed=1))
    api = await start_server(database_urls=(proxy.dsn,))
    async with proxy.away():
        assert (await api.call("GET", "/health")).status == 503
        async with consuming(api) as consumer:
            await workload._converse("consumer", consumer.socket, workload.idle())
    assert not history.calls
