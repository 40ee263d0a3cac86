"""Reading through a server, where PostgreSQL is out of reach."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from queen.errors import DatabaseUnavailable, NotFound, QueenError, SettingsError
from queen.spark.options import Access
from queen.spark.sink.publishers import ServerPublisher
from queen.spark.source.logs import Log, ServerLog, ShardLog, Span
from queen.spark.source.reading import open_log
from queen.wire.segment import Frame, decode_frames, encode_frame
from tests.conftest import StartServer
from tests.http.auth.issuer import SECRET, issue
from tests.spark.conftest import Read, collect, drain
from tests.support.ageing import Connection, age
from tests.support.api import Api

KEY = "0f" * 32


async def test_a_queue_is_read_and_followed_through_a_server(
    start_server: StartServer, read: Read, connection: Connection, tmp_path: Path
) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True)
    await api.push("vault", *({"n": n} for n in range(5)))
    await age(connection, 100)
    between = await connection.fetchval("SELECT clock_timestamp() - interval '50 s'")
    await api.push("vault", {"n": 5}, partition="a/b c")
    way = {"databaseUrls": "", "server": api.url, "schema": "n INT"}

    rows = await collect(lambda: read("vault", **way).where("offset < 3"))
    late = await collect(lambda: read("vault", **way, startingTimestamp=between.isoformat()))
    followed = await drain(read.stream("vault", **way, startingOffsets="earliest"), tmp_path / "checkpoint")

    assert sorted(row.n for row in rows) == [0, 1, 2, 5]
    assert [(row.n, row.partition) for row in late] == [(5, "a/b c")]
    assert sorted(row.n for row in followed) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("block", [7, 1024])
async def test_both_ways_say_the_same(
    api: Api, dsn: str, connection: Connection, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("queen.spark.source.logs._BLOCK", block)
    # More than fits in one answer of the server, with small segments between the large ones.
    for number in range(4):
        await api.push("orders", *(["x" * 100_000, i] for i in range(number * 30, number * 30 + 28)))
        await api.push("orders", number)
        await api.push("orders", "small")
    await connection.execute("UPDATE queen.segments SET created_at = created_at - interval '1 h' WHERE base_offset = 0")
    moment = await connection.fetchval("SELECT created_at FROM queen.segments WHERE base_offset = 30")
    direct, through = ShardLog([dsn]), ServerLog(api.url, None)

    def compare() -> None:
        positions = direct.positions(["orders"])
        assert through.positions(["orders"]) == positions
        assert through.offsets_from(positions, moment) == direct.offsets_from(positions, moment) == [30]
        (position,) = positions
        for start, end in ((0, 120), (31, 32), (29, 62), (59, 60), (100, 500), (120, 121)):
            spans = [Span("orders", position.partition, position.shard, position.id, start, end)]
            assert list(frames(through, spans)) == list(frames(direct, spans))

    await asyncio.to_thread(compare)


def frames(log: Log, spans: Sequence[Span]) -> Iterator[Frame]:
    """Segment by segment, however many come at once."""
    for run in log.segments(spans):
        numbers = run.bases.tolist(), run.counts.tolist(), run.micros.tolist()
        ends = np.cumsum(run.sizes).tolist()
        for index, (base, count, micros) in enumerate(zip(*numbers, strict=True)):
            body = run.bodies[ends[index] - int(run.sizes[index]) : ends[index]]
            yield Frame(base, count, micros, run.first_ids[16 * index : 16 * index + 16], body)


async def test_what_the_server_says_reaches_the_reader(start_server: StartServer) -> None:
    api = await start_server(queen_encryption_key=KEY)
    await api.configure("vault", encryptionEnabled=True)
    await api.push("vault", 1)
    keyless = await start_server()
    closed = await start_server(jwt_enabled=True, jwt_secret=SECRET)

    def ask() -> None:
        with pytest.raises(NotFound, match="there is no queue 'letters'"):
            ServerLog(api.url, None).positions(["letters"])
        span = Span("vault", "Default", 0, 1, 0, 1)
        with pytest.raises(QueenError, match=r"409.*offset 0 cannot be read"):
            list(ServerLog(keyless.url, None).segments([span]))
        refused = r"refuses to be read: Authentication required\. Give a token that is valid: option token, or --token"
        with pytest.raises(SettingsError, match=refused):
            ServerLog(closed.url, None).positions(["orders"])
        publisher = ServerPublisher(closed.url, issue(role="read-only"))
        with pytest.raises(SettingsError, match=r"refuses to be written to: .*Give a token of the role to write"):
            publisher.abandon("run", 1)
        publisher.close()
        with pytest.raises(
            DatabaseUnavailable, match=r"127\.0\.0\.1:1 is unavailable: \[Errno 111\] Connection refused$"
        ):
            open_log(Access(server="http://127.0.0.1:1", outage_grace=0)).positions(["orders"])

    await asyncio.to_thread(ask)


def test_a_truncated_answer_is_requested_again(caplog: pytest.LogCaptureFixture) -> None:
    whole = b'{"partitions":[]}'
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for cut in (5, 7, len(whole)):
                taken, _ = listening.accept()
                with taken:
                    taken.recv(10_000)
                    taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole[:cut])

        server = threading.Thread(target=serve)
        server.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert ServerLog(url, None, outage_grace=30).positions(["orders"]) == []
        server.join()
    assert sum("IncompleteRead" in one.message for one in caplog.records) == 2


def test_frames_survive_the_journey() -> None:
    frames = [Frame(0, 3, 17, bytes(range(16)), b"body"), Frame(3, 1, -5, bytes(16), b"")]
    data = b"".join(encode_frame(frame) for frame in frames)
    assert list(decode_frames(data)) == frames
    for cut in (1, 40, len(data) - 1):
        with pytest.raises(ValueError, match="cut short"):
            list(decode_frames(data[:cut]))
