"""Consumers on WebSockets, of the project's own client and of plain frames, that come and go."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

import aiohttp

from queen import Message, Queen, QueenError
from tests.campaign.history import Call, Outcome
from tests.campaign.log_checks import Rules
from tests.campaign.workload import LEASE_SECONDS, Idle
from tests.campaign.workloads.log import LogWorkload, pop_digest
from tests.support.consumer import PATH, acknowledgments

_FRAME_SECONDS = 0.7


class WebSocketWorkload(LogWorkload):
    """Leases end with their connection; nothing else is different."""

    name = "websocket"
    groups = ("frames", "client")
    consumers = 2

    @property
    def rules(self) -> Rules:
        return Rules(self.name, LEASE_SECONDS, releases=True)

    def clients(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*(self.consume_frames(number) for number in range(self.consumers)), self.consume_with_client()]

    # Plain frames.

    async def consume_frames(self, number: int) -> None:
        idle = self.idle()
        name = f"{self.name}/frames{number}"
        url = self.site.urls[number % len(self.site.urls)]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=5)) as session:
            while not idle.long_enough:
                try:
                    async with asyncio.timeout(20), session.ws_connect(url + PATH, heartbeat=2) as socket:
                        await self._converse(name, socket, idle)
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError):
                    await self.back_off()

    async def _converse(self, name: str, socket: aiohttp.ClientWebSocketResponse, idle: Idle) -> None:
        """Some batches, and then away, in a hurry or with good manners."""
        since = self.history.now()
        subscription = {"id": "s", "queue": self.queue, "consumerGroup": "frames", "batch": 7, "partitions": 2}
        await socket.send_json({"type": "subscribe", **subscription})
        early: deque[dict[str, Any]] = deque()
        begun = False
        for _ in range(self.chance.randint(1, 25)):
            if idle.long_enough:
                return
            frame = early.popleft() if early else await self._next(socket)
            if frame is None:
                # Before it has begun nothing can come: that is no empty answer.
                if begun:
                    self._note_nothing(name, idle)
            elif frame["type"] == "error":
                await self.back_off()
                return
            elif frame["type"] == "subscribed":
                begun = True
            elif frame["type"] == "batch":
                call = self._note_batch(name, frame, since)
                idle.note(call, call.answer)
                since = await self._answer(name, socket, frame, call, early)

    async def _next(self, socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_FRAME_SECONDS):
                frame: dict[str, Any] = await socket.receive_json()
        except TimeoutError:
            return None
        return frame

    def _note_nothing(self, name: str, idle: Idle) -> None:
        call = self.history.begin(name, "pop", {"group": "frames"})
        idle.note(self.history.end(call, Outcome.OK), None)

    def _note_batch(self, name: str, frame: dict[str, Any], since: float) -> Call:
        call = self.history.begin(name, "pop", {"group": "frames"})
        answer = pop_digest(frame)
        return self.history.end(call, Outcome.OK, answer and answer | {"since": since})

    async def _answer(
        self,
        name: str,
        socket: aiohttp.ClientWebSocketResponse,
        frame: dict[str, Any],
        popped: Call,
        early: deque[dict[str, Any]],
    ) -> float:
        """Ack a batch and give credit for the next, which may come `early`; returns since when it can be granted."""
        since = self.history.now()
        args = {"group": "frames", "lease": popped.answer["lease"], "messages": popped.answer["messages"]}
        call = self.history.begin(name, "ack", args)
        try:
            body = {"acknowledgments": acknowledgments(frame["messages"]), "subscription": "s", "credit": 1}
            await socket.send_json({"type": "ack", "id": "a", **body})
            while True:
                answer: dict[str, Any] = await socket.receive_json()
                if answer.get("id") == "a":
                    break
                early.append(answer)
        except BaseException as error:
            self.history.end(call, Outcome.UNKNOWN, error=type(error).__name__)
            raise
        if answer["type"] == "acked":
            self.history.end(call, Outcome.OK, [[one["success"], one["dlq"]] for one in answer["results"]])
        else:
            self.history.end(call, Outcome.UNKNOWN, error=str(answer))
        return since

    # The client.

    async def consume_with_client(self) -> None:
        """It acks by itself after the handler: whether it did is known when the same connection brings more."""
        stop = asyncio.Event()
        name = f"{self.name}/client"
        idle = self.idle()
        prober = self.client("prober")
        path = f"/api/v1/resources/queues/{self.queue}/depth"

        async def handle(messages: list[Message]) -> None:
            call = self.history.begin(name, "pop", {"group": "client"})
            answer = pop_digest({"messages": messages})
            # It has up to two connections' worth of batches in hand: when it was granted is not known.
            self.history.end(call, Outcome.OK, answer and answer | {"since": 0.0})
            idle.note(call, messages)
            ack = self.history.begin(name, "ack", {"group": "client", **_acked(call)})
            self.history.end(ack, Outcome.UNKNOWN, error="acked by the client")

        async def watch() -> None:
            while not idle.long_enough:
                await asyncio.sleep(0.2)
                # While the client reconnects it says nothing, too: only the server knows whether anything is left.
                asked = await prober.call("idle", {}, "GET", path, query={"group": "client"}, digest=_pending)
                idle.note(asked, asked.answer)
            stop.set()

        async def consume(queen: Queen, signal: asyncio.Event) -> None:
            while not signal.is_set():
                try:
                    queue = queen.queue(self.queue).group("client").batch(5)
                    await queue.consume(handle, signal=signal, transport="websocket")
                except (QueenError, OSError):
                    await self.back_off()

        async with Queen(self.site.urls[0], retry_delay_millis=50, handle_signals=False) as queen:
            # After long faults it pauses for longer than it may be idle: with their end it begins again.
            await consume(queen, self.stage.healed)
            watching = asyncio.create_task(watch())
            await consume(queen, stop)
            await watching


def _pending(body: Any) -> int:
    pending: int = body["pending"]
    return pending


def _acked(call: Call) -> dict[str, Any]:
    answer = call.answer or {"lease": "", "messages": []}
    return {"lease": answer["lease"], "messages": answer["messages"]}
