"""`queen tail`: the messages of a queue as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

import typer

from queen.cli.commands.messaging import popped
from queen.cli.common.arguments import QueueName
from queen.cli.common.exits import NothingFound, UserError, explain
from queen.cli.common.filters import Grep, Matches, Where, message_filter
from queen.cli.common.output import Output
from queen.cli.common.printable import json_text, printable
from queen.cli.common.session import Session
from queen.cli.common.times import iso, parse_duration, parse_time
from queen.cli.common.tree import command, group

app = group("Print the messages of a queue as they come.")

Answer = TypeVar("Answer")

_BATCH: Final = 100
_RETRY_SECONDS: Final = 1.0
_STYLES: Final = ("cyan", "green", "yellow")


@command(
    app,
    "tail",
    example="""
queen tail orders
queen tail orders -f --from new --where status=failed
queen tail orders -f --since '10m ago' --grep EUR --no-color
""",
)
def tail(
    ctx: typer.Context,
    queue: QueueName,
    cg: Annotated[
        str, typer.Option("--cg", "--group", help="The consumer group that stores the position.")
    ] = "queenctl-tail",
    partition: Annotated[str | None, typer.Option("--partition", help="Only this partition.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Wait for more, until Ctrl-C.")] = False,
    limit: Annotated[int | None, typer.Option("-n", "--limit", min=1, help="Stop after this many.")] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=10_000, help="How many to take with one request.")
    ] = _BATCH,
    max_partitions: Annotated[int, typer.Option("--max-partitions", min=1, help="Partitions of one request.")] = 10,
    auto_ack: Annotated[
        bool, typer.Option("--auto-ack", help="Acknowledge on delivery instead of after printing.")
    ] = False,
    start: Annotated[str | None, typer.Option("--from", help="Where a new group begins: all or new.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Where a new group begins: a time.")] = None,
    idle_millis: Annotated[
        int | None, typer.Option("--idle-millis", min=1, help="Stop after this long without messages.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=64, help="Requests at the same time.")] = 1,
    timeout: Annotated[str, typer.Option("--timeout", help="How long one request waits for messages.")] = "10s",
    where: Where = None,
    grep: Grep = None,
) -> None:
    """Print the messages of a queue as they come.

    A line of JSON for each; on a terminal in colours, unless an output format is named. The group
    remembers how far it was read: the next tail goes on there. Other groups do not notice.
    [bold]-f[/bold] outlives restarts of the server.
    """
    if start not in (None, "all", "new", "new-only"):
        raise UserError(f"--from must be all or new, not {start!r}; --since takes a time")
    session = Session.of(ctx)
    seconds = parse_duration(timeout)
    parameters = {
        "batch": batch,
        "consumerGroup": cg,
        "partitions": max_partitions,
        "autoAck": str(auto_ack).lower(),
        "subscriptionMode": start,
        "subscriptionFrom": None if since is None else iso(parse_time(since)),
    }
    reader = _Tail(session, queue, partition, parameters, message_filter(where, grep), limit, cg, seconds)
    if not follow:
        reader.take(wait=False)
    else:
        threads = [threading.Thread(target=reader.follow, args=(idle_millis,), daemon=True) for _ in range(concurrency)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                # A join without a limit could not be interrupted by Ctrl-C everywhere.
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            reader.ended.set()
            return
        if reader.failure is not None:
            raise reader.failure
    if not reader.printed:
        raise NothingFound


class _Tail:
    """Takes messages, prints those that are meant, and acknowledges all of them."""

    def __init__(
        self,
        session: Session,
        queue: str,
        partition: str | None,
        parameters: Mapping[str, Any],
        matches: Matches,
        limit: int | None,
        cg: str,
        wait_seconds: float,
    ) -> None:
        self._queen = session.connect(int(wait_seconds * 1000) + 5000)
        self._out = session.out
        self._queue = queue
        self._partition = partition
        self._parameters = parameters
        self._matches = matches
        self._limit = limit
        self._cg = cg
        self._wait_millis = int(wait_seconds * 1000)
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.failure: Exception | None = None
        self.printed = 0
        self._patient = False
        self._waiting = False
        self._last = time.monotonic()

    def follow(self, idle_millis: int | None) -> None:
        """Until the limit, the end of the queue, or a signal."""
        try:
            while not self.ended.is_set():
                if self.take(wait=True, idle_millis=idle_millis):
                    self._last = time.monotonic()
                elif self._is_idle(idle_millis):
                    return
                # A server that was reached once, and restarts, is there again soon.
                self._patient = True
        except Exception as error:
            self.failure = error
            self.ended.set()

    def take(self, *, wait: bool, idle_millis: int | None = None) -> int:
        """One request; how many messages came."""
        millis = min(self._wait_millis, idle_millis or self._wait_millis)
        asked = {**self._parameters, "wait": str(wait).lower(), "timeout": millis}
        if self._limit is not None:
            asked["batch"] = min(asked["batch"], max(1, self._limit - self.printed))
        messages = self._ask(lambda: popped(self._queen, self._queue, self._partition, asked), idle_millis)
        leased = [message for message in messages if message.get("leaseId")]
        with self._lock:
            done = self._print(messages)
        if leased:
            # What was not printed because of the limit is given back, and delivered to the next tail.
            acked = [
                self._ack(message, "completed" if number < done else "retry") for number, message in enumerate(messages)
            ]
            body = {"acknowledgments": acked, "consumerGroup": self._cg}
            # Left undone, it would keep what follows from being delivered until the lease ends.
            self._patient = self._patient or wait
            self._ask(lambda: self._queen.request("POST", "/api/v1/ack/batch", body), idle_millis)
        return len(messages)

    def _ask(self, request: Callable[[], Answer], idle_millis: int | None) -> Answer:
        """The answer of the server, when it is there again if it was there before."""
        from queen.client.errors import OverloadedError, QueenConnectionError

        while True:
            try:
                answer = request()
            except (QueenConnectionError, OverloadedError) as error:
                if not self._patient or self._is_idle(idle_millis) or self.ended.is_set():
                    raise
                with self._lock:
                    if not self._waiting:
                        self._out.note(f"{explain(error)[1].partition('; ')[0]}; trying again")
                    self._waiting = True
                self.ended.wait(_RETRY_SECONDS)
            else:
                self._waiting = False
                return answer

    def _is_idle(self, millis: int | None) -> bool:
        return millis is not None and (time.monotonic() - self._last) * 1000 >= millis

    def _print(self, messages: list[dict[str, Any]]) -> int:
        for number, message in enumerate(messages):
            if self._limit is not None and self.printed >= self._limit:
                self.ended.set()
                return number
            if self._matches(message):
                show(self._out, message)
                self.printed += 1
        if self._limit is not None and self.printed >= self._limit:
            self.ended.set()
        return len(messages)

    @staticmethod
    def _ack(message: Mapping[str, Any], status: str) -> dict[str, Any]:
        return {name: message[name] for name in ("transactionId", "partitionId", "leaseId")} | {"status": status}


def show(out: Output, message: Mapping[str, Any]) -> None:
    """A message on one line: JSON, or for a person at a terminal its time, place and data in colours."""
    if out.given is not None or not (out.terminal or out.color):
        out.line({name: value for name, value in message.items() if value not in (None, "") or name == "data"})
        return
    # The same partition has the same colour, whatever the order in which partitions turn up.
    style = _STYLES[sum(str(message["partition"]).encode()) % len(_STYLES)]
    out.text(
        " ".join(
            (
                out.styled(str(message["createdAt"]), "dim"),
                out.styled(f"{message['queue']}/{message['partition']}", style),
                out.styled(printable(str(message["transactionId"])), "dim"),
                json_text(message["data"]),
            )
        )
    )
