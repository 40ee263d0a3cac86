"""Bytes that are almost right: recorded requests and WebSocket frames, mutated, against a server in its own processes.

`python -m tests.campaign.fuzz --requests 1000000`: no 5xx but 503, no hang, no worker that dies, no growing memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote_from_bytes, urlsplit

import aiohttp
import msgspec
import psutil
import uvloop

from tests.acceptance.served import Served, served
from tests.campaign.sqs_requests import sqs_requests
from tests.support.raw_websocket import TEXT, frame, handshake
from tests.support.workers import worker_processes

_QUEUE, _GROUP, _NAMESPACE, _TOPIC = "fuzzed", "group", "space", "jobs"
_ANSWER_SECONDS = 20.0
_UNFINISHED_SECONDS = 0.3
"""How long an answer is waited for when the request may not be complete."""
_AT_ONCE = 64
_STEPS = 10
_WEBSOCKET_SHARE = 0.1
_MOST_GROWTH_BYTES = 150 << 20
_FRAMING = b"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: %d"
_END = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
# Streams without end, and what stops the server from taking part.
_LEFT_OUT = ("/api/v1/events",)
SETTINGS = {"MAX_WAIT_MS": "100", "DB_STATEMENT_TIMEOUT": "5000", "WEBSOCKET_PING_MS": "60000", "QUEEN_SQS": "true"}
_INTERESTING: Sequence[bytes] = (
    b"", b"\x00", b"\xff", b"\r\n", b"\r\n\r\n", b"\n", b"%00", b"%ff", b"%", b"..", b"//", b"\\u0000", b"\\ud800",
    b"null", b"true", b"[]", b"{}", b'""', b"-1", b"0", b"1e400", b"9223372036854775808", b"-9223372036854775809",
    b"0.5", b"NaN", b'"x"', b"a" * 300, b"[" * 200, b'{"a":' * 50, "é\N{GRINNING FACE}".encode(),
    b"9999-12-31T23:59:59Z", b"0001-01-01T00:00:00Z", b"51756565-0000-8000-8000-000000000001",
    b"51756565-ffff-8000-ffff-ffffffffffff",
    b"019dd000-0000-7000-8000-000000000001", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n",
    b"Expect: 100-continue\r\n", b"Upgrade: websocket\r\n", b"Connection: close\r\n",
)  # fmt: skip
_VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 0.5, 1e300, 2**31, 2**63 - 1, -(2**63), 2**63, 10**30, "", "\0", "x", "é" * 300, "1",
    "a" * 70_000, "\U0001f600", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "51756565-ffff-8000-ffff-ffffffffffff",
    "019dd000-0000-7000-8000-000000000001", [], {}, [None], [[]], {"a": {}}, {"": None}, "../..", "%00", "Infinity",
)  # fmt: skip
_NUMBER = re.compile(rb"-?\d+")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_PARAMETER = re.compile(rb"(?<==)[^&\s]*")
_LINE = re.compile(rb"(?:GET|POST|PUT|DELETE|PATCH) [!-~]+ HTTP/1\.1")
_STRING = re.compile(rb'"[^"\\]{0,80}"')


@dataclass
class Findings:
    """What came of it."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rss_before: int = 0
    """Of the workers, in bytes, after the first requests."""
    rss: list[int] = field(default_factory=list)
    """After each tenth of the others."""

    def text(self) -> str:
        by_class = Counter[str]()
        for status, count in self.statuses.items():
            by_class[str(status) if status >= 500 else f"{status // 100}xx" if status else "no answer"] += count
        memory = ", ".join(str(rss >> 20) for rss in (self.rss_before, *self.rss))
        lines = [
            f"{self.requests} requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(by_class.items())),
            f"memory of the workers after each tenth, MB: {memory}",
            f"failures: {len(self.failures)}",
        ]
        return "\n".join([*lines, *self.failures[:20]])


# What was recorded.


async def record(url: str) -> list[bytes]:
    """Requests as they go over the wire: one for every route, with the example of its document or a good body.

    The actions of SQS, which are in no document, are among them."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/openapi.json") as answer:
            document = await answer.json()
        lease = await _make_objects(session, url)
        requests = await sqs_requests(session, url)
    for path, operations in document["paths"].items():
        if path in _LEFT_OUT:
            continue
        for method, operation in operations.items():
            if method in ("get", "post", "put", "delete", "patch"):
                requests += _requests_of(path, method, operation, lease)
    return requests


async def _make_objects(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    """Something that requests can name; the ids of it."""
    items = [{"queue": _QUEUE, "payload": {"n": n}, "transactionId": f"t{n}"} for n in range(20)]
    async with session.post(f"{url}/api/v1/push", json={"items": items}) as answer:
        (first, *_) = await answer.json()
    async with session.get(
        f"{url}/api/v1/pop/queue/{_QUEUE}", params={"consumerGroup": _GROUP, "batch": "5"}
    ) as answer:
        popped = await answer.json()
    item = {"namespace": _NAMESPACE, "topic": _TOPIC, "data": 1, "idempotency_key": "k"}
    async with session.post(f"{url}/api/v1/topics/enqueue", json=[item]) as answer:
        (id,) = await answer.json()
    query = {"name": "query", "source_queue": _QUEUE, "config_hash": "h"}
    async with session.post(f"{url}/streams/v1/queries", json=query) as answer:
        registered = await answer.json()
    return {
        "partition": first["partition_id"],
        "lease": popped["leaseId"],
        "id": str(id),
        "query": registered["query_id"],
    }


def _requests_of(path: str, method: str, operation: dict[str, Any], ids: dict[str, str]) -> list[bytes]:
    names = {
        "queue": _QUEUE, "group": _GROUP, "transaction": "t1", "transactionId": "t1", "partitionId": ids["partition"],
        "lease": ids["lease"], "leaseId": ids["lease"], "namespace": _NAMESPACE, "topic": _TOPIC, "name": _QUEUE,
    }  # fmt: skip
    in_messages = "/messages/" in path or "/traces/" in path
    names["partition"] = ids["partition"] if in_messages else "Default"
    target = re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "1"), path)
    queries = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "query"]
    known = names | {"limit": "3", "batch": "2", "wait": "true", "timeout": "20", "consumerGroup": _GROUP}
    full = "&".join(f"{name}={known.get(name, '1')}" for name in queries)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    bodies = [msgspec.json.encode(body["example"])] if "example" in body else []
    bodies += _good_bodies(ids).get(f"{method.upper()} {path}", [])
    if body and not bodies:
        bodies = [b"{}"]
    return [
        _request(method, one, content)
        for one in ({target, f"{target}?{full}"} if queries else {target})
        for content in bodies or [b""]
    ]


def _good_bodies(ids: dict[str, str]) -> dict[str, list[bytes]]:
    """Bodies of the hot routes, more than their examples."""
    ack = {"transactionId": "t1", "partitionId": ids["partition"], "leaseId": ids["lease"], "status": "completed"}
    item = {
        "queue": _QUEUE,
        "partition": "p",
        "payload": {"a": [1, 2.5, None, "é"]},
        "transactionId": "x",
        "traceId": None,
    }
    topic = {"namespace": _NAMESPACE, "topic": _TOPIC}
    cycle = {
        "query_id": ids["query"], "partition_id": ids["partition"], "consumer_group": _GROUP,
        "state_ops": [{"type": "upsert", "key": "k", "value": {"n": 1}}],
        "push_items": [{"queue": "out", "payload": 1}],
        "ack": {"transactionId": "t1", "leaseId": ids["lease"], "status": "completed", "count": 1},
        "release_lease": True,
    }  # fmt: skip
    found: dict[str, list[Any]] = {
        "POST /api/v1/push": [{"items": [item, item | {"transactionId": "y"}]}, {"items": [item], "bufferMs": 10}],
        "POST /api/v1/ack": [ack | {"consumerGroup": _GROUP}],
        "POST /api/v1/ack/batch": [{"acknowledgments": [ack, ack | {"status": "failed"}], "consumerGroup": _GROUP}],
        "POST /api/v1/transaction": [{"operations": [{"type": "push", "items": [item]}, {"type": "ack", **ack}]}],
        "POST /streams/v1/cycle": [cycle],
        "POST /streams/v1/state/get": [{"query_id": ids["query"], "partition_id": ids["partition"], "keys": ["k"]}],
        "POST /api/v1/topics/enqueue": [[topic | {"data": 1, "priority": 2, "delay": 1, "metadata": {"a": 1}}]],
        "POST /api/v1/topics/ack": [[topic | {"id": ids["id"], "lease_owner": "o"}]],
        "POST /api/v1/topics/nack": [[topic | {"id": ids["id"], "error": "e"}]],
    }
    return {route: [msgspec.json.encode(body) for body in bodies] for route, bodies in found.items()}


def _request(method: str, target: str, body: bytes) -> bytes:
    return f"{method.upper()} {target} HTTP/1.1\r\n".encode() + _FRAMING % len(body) + b"\r\n\r\n" + body


def recorded_frames(ids_queue: str = _QUEUE) -> list[bytes]:
    """Payloads of frames that consumers send."""
    ack = {"transactionId": "t1", "partitionId": "51756565-0000-8000-8000-000000000001"}
    frames: list[dict[str, Any]] = [
        {"type": "subscribe", "id": "s", "queue": ids_queue, "batch": 2, "credit": 2, "consumerGroup": "ws"},
        {
            "type": "subscribe",
            "id": "a",
            "queue": ids_queue,
            "autoAck": True,
            "subscriptionMode": "new",
            "partitions": 3,
        },
        {"type": "credit", "id": "s", "credit": 1},
        {"type": "ack", "id": 1, "leaseId": "019dd000-0000-7000-8000-000000000001", "acknowledgments": [ack, ack]},
        {"type": "nack", "id": 2, **ack, "error": "no"},
        {"type": "renew", "id": 3, "leaseId": "019dd000-0000-7000-8000-000000000001", "seconds": 5},
        {"type": "ping", "id": 4},
        {"type": "unsubscribe", "id": "s", "release": True},
    ]
    return [msgspec.json.encode(one) for one in frames]


# Mutations.


class Mutator:
    """Makes of what was recorded something that is almost it."""

    def __init__(self, chance: random.Random, requests: Sequence[bytes]) -> None:
        self._chance = chance
        self._requests = requests
        self._frames = recorded_frames()

    def request(self) -> bytes:
        request = self._chance.choice(self._requests)
        head, _, body = request.partition(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        kind = self._chance.random()
        if kind < 0.6 and body:
            # What is still JSON comes past the parser, to what is behind it.
            body = self.mutate_json(body) if kind < 0.35 else self.mutate(body)
        elif kind < 0.6 and b"=" in first:
            head = self._replace(_PARAMETER, first, percent_encoded) + b"\r\n" + rest
        elif kind < 0.8:
            head = self.mutate(first) + b"\r\n" + rest
        else:
            return self.mutate(request)
        if self._chance.random() < 0.9:
            # Else it would be refused before anybody looks at the body.
            head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head)
        return head + b"\r\n\r\n" + body

    def frames(self) -> bytes:
        """Frames of one conversation, some of them broken."""
        sent = b""
        for payload in self._chance.choices(self._frames, k=self._chance.randint(1, 4)):
            one = self.mutate(payload) if self._chance.random() < 0.6 else payload
            opcode = self._chance.choice((TEXT, TEXT, TEXT, TEXT, 0x0, 0x2, 0x8, 0x9, 0xA, 0x3))
            raw = frame(one, opcode, last=self._chance.random() < 0.9, masked=self._chance.random() < 0.95)
            sent += self.mutate(raw) if self._chance.random() < 0.15 else raw
        return sent

    def mutate_json(self, data: bytes) -> bytes:
        """Another document: values replaced, keys gone or under another name, elements again."""
        try:
            document = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return self.mutate(data)
        for _ in range(self._chance.choice((1, 1, 2, 3))):
            document = self._mutate_value(document)
        return msgspec.json.encode(document)

    def _mutate_value(self, value: Any) -> Any:
        chance = self._chance
        if not value or not isinstance(value, (dict, list)) or chance.random() < 0.1:
            return copy.deepcopy(chance.choice(_VALUES))
        place = chance.randrange(len(value))
        key = list(value)[place] if isinstance(value, dict) else place
        what = chance.random()
        if what < 0.7:
            value[key] = self._mutate_value(value[key])
        elif what < 0.8:
            del value[key]
        elif isinstance(value, dict):
            value[chance.choice(("a", "", "id", "\0", f"{key}x"))] = copy.deepcopy(value[key])
        else:
            value += [copy.deepcopy(value[place]) for _ in range(chance.randint(1, 3))]
        return value

    def mutate(self, data: bytes) -> bytes:
        for _ in range(self._chance.choice((1, 1, 2, 4))):
            data = self._mutate_once(data)
        return data

    def _mutate_once(self, data: bytes) -> bytes:
        chance = self._chance
        place = chance.randrange(len(data) + 1)
        match chance.randrange(8):
            case 0 if data:
                place = min(place, len(data) - 1)
                return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
            case 1:
                return data[:place] + data[place + chance.randint(1, 16) :]
            case 2:
                return data[:place] + chance.choice(_INTERESTING) + data[place:]
            case 3:
                piece = data[place : place + chance.randint(1, 64)]
                return data[:place] + piece * chance.randint(2, 4) + data[place:]
            case 4:
                return data[:place] + chance.randbytes(chance.randint(1, 8)) + data[place:]
            case 5:
                return self._replace(_NUMBER, data)
            case 6:
                return self._replace(_STRING, data)
            case _:
                other = chance.choice(self._requests)
                return data[:place] + other[chance.randrange(len(other)) :]

    def _replace(
        self, pattern: re.Pattern[bytes], data: bytes, encoded: Callable[[bytes], bytes] = lambda value: value
    ) -> bytes:
        found = list(pattern.finditer(data))
        if not found:
            return data
        one = self._chance.choice(found)
        return data[: one.start()] + encoded(self._chance.choice(_INTERESTING)) + data[one.end() :]


def percent_encoded(value: bytes) -> bytes:
    return quote_from_bytes(value, safe="").encode()


def is_complete(request: bytes) -> bool:
    """Whether a request says where it ends, and does: then it has to be answered."""
    head, separator, body = request.partition(b"\r\n\r\n")
    lengths = re.findall(rb"(?i)\r\ncontent-length: *(\d+) *(?=\r\n|$)", head)
    if not separator or b"transfer-encoding" in head.lower() or b"upgrade" in head.lower():
        return False
    return len(lengths) == 1 and len(lengths[0]) < 9 and len(body) >= int(lengths[0])


def is_framed(request: bytes) -> bool:
    """Whether another request may follow it on its connection: only its target and its body are strange."""
    head, separator, body = request.partition(b"\r\n\r\n")
    first, _, rest = head.partition(b"\r\n")
    return bool(separator) and _LINE.fullmatch(first) is not None and rest == _FRAMING % len(body)


# The run.


class Fuzzer:
    """Sends mutated requests, several at a time, and looks at what comes back."""

    def __init__(self, url: str, mutator: Mutator, findings: Findings) -> None:
        place = urlsplit(url)
        assert place.hostname is not None and place.port is not None
        self._address = place.hostname, place.port
        self._url = url
        self._mutator = mutator
        self._findings = findings

    async def run(self, requests: int, chance: random.Random) -> None:
        left = iter(range(requests))
        await asyncio.gather(*(self._some(left, chance) for _ in range(_AT_ONCE)))

    async def _some(self, left: Iterator[int], chance: random.Random) -> None:
        async with _Connection(self._address) as kept:
            for _ in left:
                self._findings.requests += 1
                if chance.random() < _WEBSOCKET_SHARE:
                    await self._converse(self._mutator.frames())
                    continue
                request = self._mutator.request()
                if is_framed(request):
                    await self._ask(kept, request)
                else:
                    await self._ask_apart(request)

    async def _ask(self, connection: _Connection, request: bytes) -> None:
        """A request that is answered, and after which its connection can go on."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                status = await connection.ask(request)
        except TimeoutError:
            status = 0
        if not status:
            self._fail("no answer", request)
        self._note([status], request)

    async def _ask_apart(self, request: bytes) -> None:
        """A request that ends nobody knows where, with one behind it that asks for the end of the connection."""
        complete = is_complete(request)
        statuses: list[int] = []
        async with _Connection(self._address) as connection:
            try:
                async with asyncio.timeout(_ANSWER_SECONDS if complete else _UNFINISHED_SECONDS):
                    statuses = await connection.ask_all(request + _END)
            except TimeoutError:
                if complete:
                    self._fail("no answer", request)
        self._note(statuses or [0], request)

    def _note(self, statuses: list[int], request: bytes) -> None:
        self._findings.statuses[statuses[0]] += 1
        odd = [status for status in statuses if status >= 500 and status not in (501, 503, 505)]
        if odd:
            self._fail(f"status {odd[0]}", request)

    async def _converse(self, frames: bytes) -> None:
        reader, writer = await asyncio.open_connection(*self._address, limit=1 << 22)
        received = b""
        try:
            writer.write(handshake(self._url) + frames)
            async with asyncio.timeout(_ANSWER_SECONDS):
                await reader.readuntil(b"\r\n\r\n")
            # What is still open then is a subscription that waits.
            async with asyncio.timeout(0.05):
                while chunk := await reader.read(65536):
                    received += chunk
        except TimeoutError:
            pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self._fail("no handshake", frames)
        finally:
            writer.transport.abort()
        self._findings.statuses[101] += 1
        odd = [int(status) for status in re.findall(rb'"type":"error"[^{}]*"status":(\d+)', received)]
        if any(status >= 500 and status != 503 for status in odd):
            self._fail(f"error frame {odd}", frames)

    def _fail(self, what: str, sent: bytes) -> None:
        self._findings.failures.append(f"{what}: {sent[:2000]!r}")


class _Connection:
    """A connection that is made when it is needed, and kept while both sides agree on where an answer ends."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def ask(self, request: bytes) -> int:
        """The status of the one answer; 0 when there is none."""
        for _ in range(2):
            kept = self._streams is not None
            try:
                status, stays = await _read_answer(await self._send(request))
            except (ConnectionError, asyncio.IncompleteReadError):
                self.close()
                # One that was idle for long is closed by the server, perhaps while this was on its way.
                if kept:
                    continue
                return 0
            except BaseException:
                self.close()
                raise
            if not stays:
                self.close()
            return status
        return 0

    async def ask_all(self, requests: bytes) -> list[int]:
        """The statuses of whatever is answered until the connection ends, or a stream begins that does not."""
        reader = await self._send(requests)
        statuses: list[int] = []
        stays = True
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while stays and not reader.at_eof():
                status, stays = await _read_answer(reader)
                statuses.append(status)
        return statuses

    async def _send(self, request: bytes) -> asyncio.StreamReader:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(request)
        return reader


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status of the next answer, whose body is skipped, and whether the connection stays."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    length = _LENGTH.search(head)
    if length is not None and status not in (101, 204, 304):
        # The answer to a HEAD has a length and no body: it is the last that can be told apart.
        await reader.readexactly(int(length[1]))
    return status, b"\r\nconnection: close" not in head.lower() and (length is not None or status in (204, 304))


async def fuzz(server: Served, requests: int, seed: int, *, progress: bool = False) -> Findings:
    """Send so many requests; says what was found."""
    chance = random.Random(seed)
    findings = Findings()
    fuzzer = Fuzzer(server.url, Mutator(chance, await record(server.url)), findings)
    workers = worker_pids(server)
    warm = min(requests // 5, 20_000)
    await fuzzer.run(warm, chance)
    findings.rss_before = _rss(server)
    for part in range(_STEPS):
        await fuzzer.run((requests - warm) // _STEPS + (part < (requests - warm) % _STEPS), chance)
        findings.rss.append(_rss(server))
        if progress:
            print(findings.text(), flush=True)
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as answer:
        if answer.status != 200:
            findings.failures.append(f"health afterwards: {answer.status}")
    if worker_pids(server) != workers:
        findings.failures.append(f"workers died: {workers} before, {worker_pids(server)} now")
    if findings.rss[-1] - findings.rss_before > _MOST_GROWTH_BYTES:
        findings.failures.append("memory has grown")
    if "Traceback" in server.log.read_text(errors="replace"):
        findings.failures.append(f"a traceback in the log: {server.log.read_text(errors='replace')[-3000:]}")
    return findings


def worker_pids(server: Served) -> list[int]:
    return sorted(worker.pid for worker in worker_processes(server.pid))


def _rss(server: Served) -> int:
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in worker_pids(server))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as directory,
        served(Path(directory), **SETTINGS) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        findings = runner.run(fuzz(server, options.requests, options.seed, progress=True))
    print(findings.text())
    command = f"python -m tests.campaign.fuzz --requests {options.requests} --seed {options.seed}"
    print(f"{time.monotonic() - begun:.0f} s; again: {command}")
    return 1 if findings.failures else 0


if __name__ == "__main__":
    sys.exit(main())
