"""A stream counts events in windows: what comes out is the truth, once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from queen import QueenError
from queen.streams import Runner
from tests.campaign.client import Recorder
from tests.campaign.history import Call, Violation
from tests.campaign.workload import LEASE_SECONDS, Workload
from tests.streams.counting import QUERY, counting, counts, truth
from tests.support.database import stored_log

_PARTITIONS = 3
_FAR_AWAY_MS = 10_000_000
_DRAIN_SECONDS = 60.0
_STREAM_ERRORS = (QueenError, OSError, TimeoutError, RuntimeError)


class StreamsWorkload(Workload):
    """Events of two keys for each partition; every window is emitted exactly once, with the right count."""

    name = "streams"
    one_shard = True

    async def prepare(self) -> None:
        for queue in ("in", "out"):
            body = {"queue": queue, "options": {"leaseTime": LEASE_SECONDS}}
            await self.persist(self.client("setup"), "setup", "POST", "/api/v1/configure", body)

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*(self.produce(number) for number in range(_PARTITIONS)), *(self.count(number) for number in range(2))]

    async def produce(self, number: int) -> None:
        client = self.client(f"producer{number}")
        second = 0
        while not self.stage.produced.is_set():
            events = [{"k": f"{key}{number}", "at": second * 1000, "n": 1} for key in "ab"]
            await self._push(client, number, second, events)
            second += 1
            await self.pause()
        await self.stage.healed.wait()
        # The last one closes all windows before it.
        await self._push(client, number, second, [{"k": "end", "at": _FAR_AWAY_MS, "n": 1}])
        await client.close()

    async def _push(self, client: Recorder, number: int, second: int, events: list[dict[str, Any]]) -> Call:
        body = {
            "items": [
                {"queue": "in", "partition": f"p{number}", "transactionId": f"{second}-{place}", "payload": event}
                for place, event in enumerate(events)
            ]
        }
        args = {"partition": number, "second": second, "event": events[0]["k"]}
        while not (call := await client.call("push", args, "POST", "/api/v1/push", body)).ok:
            await self.back_off()
        return call

    async def count(self, number: int) -> None:
        """A stream that is stopped now and then, as a process that is updated."""
        url = self.site.urls[number % len(self.site.urls)]
        while not self.stage.healed.is_set():
            runner = await self._start(url)
            if runner is None:
                continue
            try:
                async with asyncio.timeout(self.chance.uniform(5, 20)):
                    await self.stage.healed.wait()
            except TimeoutError:
                await runner.stop()
                continue
            await self._drain()
            await runner.stop()

    async def _start(self, url: str) -> Runner | None:
        try:
            return await counting().run(QUERY, url, batch_size=11, max_partitions=2, max_wait_millis=300)
        except _STREAM_ERRORS:
            await self.back_off()
            return None

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while await self._missing():
                    await self.back_off()
        except TimeoutError:
            return

    async def _missing(self) -> bool:
        events, emitted = await self._final()
        ends = sum(event["k"] == "end" for event in events)
        return ends < _PARTITIONS or bool(truth([events]) - counts(emitted))

    async def _final(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The events that are stored, and the windows that came out."""
        found: dict[str, list[dict[str, Any]]] = {"in": [], "out": []}
        async with self.site.connection() as connection:
            for queue, payloads in found.items():
                for messages in (await stored_log(connection, queue)).values():
                    payloads += [msgspec.json.decode(one.payload) for one in messages]
        return found["in"], found["out"]

    async def check(self) -> list[Violation]:
        events, emitted = await self._final()
        found = check_counts(self.name, truth([events]), counts(emitted))
        stored = {(event["k"], event["at"]) for event in events}
        for call in self.calls("push"):
            event = (f"a{call.args['partition']}", call.args["second"] * 1000)
            if call.ok and call.args["event"] != "end" and event not in stored:
                found.append(Violation(self.name, "lost", f"event {event}", (call,)))
        return found


def check_counts(
    workload: str, came_in: Counter[tuple[str, int]], came_out: Counter[tuple[str, int]]
) -> list[Violation]:
    """What was counted in each window is what came in for it."""
    found = []
    for window in sorted(came_in.keys() | came_out.keys()):
        if came_in[window] != came_out[window]:
            kind = "counted too little" if came_out[window] < came_in[window] else "counted twice"
            text = f"{window[0]} from {window[1]}: {came_out[window]} of {came_in[window]}"
            found.append(Violation(workload, kind, text))
    return found
