"""A sensor on the lag of a consumer group, and the trigger that waits for it while no worker is taken."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

from airflow.configuration import conf
from airflow.sdk import BaseSensorOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent

from queen.airflow.hook import DEFAULT_CONNECTION, QueenHook, depth_path
from queen.client.errors import TRANSIENT, NotFoundError
from queen.errors import QueenError

_INTERVAL_SECONDS = 10.0


class Bound:
    """`lag <= at_most` or `lag >= at_least`."""

    def __init__(self, queue: str, group: str, at_most: int | None, at_least: int | None) -> None:
        if (at_most is None) == (at_least is None):
            raise QueenError("give either at_most or at_least, not both")
        limit = at_most if at_most is not None else at_least
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise QueenError(
                f"{'at_most' if at_most is not None else 'at_least'} must be a number from 0 on, not {limit!r}"
            )
        self._queue, self._group, self._limit = queue, group, limit
        self._holds = operator.le if at_most is not None else operator.ge
        self._waits_for_messages = at_least is not None

    def __str__(self) -> str:
        sign = ">=" if self._waits_for_messages else "<="
        return f"lag of group '{self._group}' on queue '{self._queue}' {sign} {self._limit}"

    @property
    def path(self) -> str:
        return depth_path(self._queue, self._group)

    def reached(self, lag: int) -> bool:
        return bool(self._holds(lag, self._limit))

    def without_queue(self, error: NotFoundError) -> int:
        """The lag where there is no queue: it may be made by the message that is waited for, and else is a typo."""
        if self._waits_for_messages:
            return 0
        raise QueenError(f"{self}: {error}") from error


class QueenLagTrigger(BaseTrigger):
    """Fires when the lag is as wanted. While the server is unavailable it goes on asking."""

    def __init__(
        self,
        queue_name: str,
        consumer_group: str,
        at_most: int | None = None,
        at_least: int | None = None,
        queen_conn_id: str = DEFAULT_CONNECTION,
        poke_interval: float = _INTERVAL_SECONDS,
    ) -> None:
        super().__init__()
        self._arguments: dict[str, Any] = {
            "queue_name": queue_name,
            "consumer_group": consumer_group,
            "at_most": at_most,
            "at_least": at_least,
            "queen_conn_id": queen_conn_id,
            "poke_interval": poke_interval,
        }
        self._bound = Bound(queue_name, consumer_group, at_most, at_least)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """All there is to it: another triggerer goes on with that."""
        return f"{__name__}.{type(self).__name__}", dict(self._arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        try:
            lag = await self._wait()
        except QueenError as error:
            yield TriggerEvent({"error": str(error)})
            return
        yield TriggerEvent({"lag": lag})

    async def _wait(self) -> int:
        unavailable = False
        async with await QueenHook(self._arguments["queen_conn_id"]).get_async_conn() as queen:
            while True:
                try:
                    lag: int = (await queen.request("GET", self._bound.path))["pending"]
                except NotFoundError as error:
                    lag = self._bound.without_queue(error)
                except TRANSIENT as error:
                    if not unavailable:
                        self.log.warning("the server is unavailable; retrying: %s", error)
                    unavailable = True
                    await asyncio.sleep(self._arguments["poke_interval"])
                    continue
                unavailable = False
                if self._bound.reached(lag):
                    return lag
                self.log.debug("%s: the lag is %d", self._bound, lag)
                await asyncio.sleep(self._arguments["poke_interval"])


class QueenLagSensor(BaseSensorOperator):
    """Waits until a consumer group has at most, or at least, so many messages left to consume.

        QueenLagSensor(task_id="caught_up", queue_name="orders", consumer_group="billing", at_most=0)
        QueenLagSensor(task_id="work", queue_name="orders", consumer_group="etl", at_least=1000, deferrable=True)

    With `deferrable=True` it takes no worker while it waits. Its result is the lag that was found. (A `queue` is what
    Airflow calls a group of workers: that argument is its own.)
    """

    template_fields = ("queue_name", "consumer_group", "queen_conn_id")
    ui_color = "#f3e8c8"

    def __init__(
        self,
        *,
        queue_name: str,
        consumer_group: str,
        at_most: int | None = None,
        at_least: int | None = None,
        queen_conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poke_interval: timedelta | float = _INTERVAL_SECONDS,
        **options: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **options)
        Bound(queue_name, consumer_group, at_most, at_least)
        self.queue_name = queue_name
        self.consumer_group = consumer_group
        self.at_most = at_most
        self.at_least = at_least
        self.queen_conn_id = queen_conn_id
        self.deferrable = deferrable
        self.found: int | None = None

    def poke(self, context: Any) -> bool:
        bound = Bound(self.queue_name, self.consumer_group, self.at_most, self.at_least)
        with QueenHook(self.queen_conn_id).get_conn() as queen:
            try:
                lag: int = queen.request("GET", bound.path)["pending"]
            except NotFoundError as error:
                lag = bound.without_queue(error)
            except TRANSIENT as error:
                self.log.warning("the server is unavailable; retrying: %s", error)
                return False
        self.log.info("%s: the lag is %d", bound, lag)
        self.found = lag
        return bound.reached(lag)

    def execute(self, context: Any) -> int | None:
        if not self.deferrable:
            super().execute(context)
        elif not self.poke(context):
            self.defer(trigger=self._trigger(), method_name="resume", timeout=timedelta(seconds=self.timeout))
        return self.found

    def resume(self, context: Any, event: dict[str, Any]) -> int:
        """Go on with what the trigger found."""
        if "error" in event:
            raise QueenError(event["error"])
        self.log.info("lag of group '%s' on queue '%s' is %d", self.consumer_group, self.queue_name, event["lag"])
        return int(event["lag"])

    def _trigger(self) -> QueenLagTrigger:
        return QueenLagTrigger(
            self.queue_name, self.consumer_group, self.at_most, self.at_least, self.queen_conn_id, self.poke_interval
        )
