"""Notifications among workers: dispatch, and what a failing handler must not do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from queen.broker.events import Datagram, Event, EventKind, encode_datagram, named, partition_gone, pushed
from queen.broker.notifications import Notifications
from queen.bus.local_bus import LocalBus
from queen.bus.peers import by_shard
from queen.metrics.meter import Meter


class Broken(Exception):
    pass


def broken(event: object) -> None:
    raise Broken("a bug")


async def test_a_handler_that_raises_is_counted_and_the_others_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter()
    here, there = Notifications(tmp_path, 0, 2, meter), Notifications(tmp_path, 1, 2, Meter())
    received: list[object] = []
    here.subscribe({EventKind.PUSHED: broken})
    here.subscribe({EventKind.PUSHED: received.append, EventKind.QUEUE_GONE: received.append})
    here.bus.start()
    there.bus.start()
    try:
        there.send([pushed(1, 2, 3), named(EventKind.QUEUE_GONE, "orders")])
        with caplog.at_level(logging.ERROR):
            here.drain()
    finally:
        here.bus.close()
        there.bus.close()
    assert received == [pushed(1, 2, 3), named(EventKind.QUEUE_GONE, "orders")]
    assert meter.notification_errors == {"pushed": 1}
    assert "notification pushed could not be handled: a bug" in caplog.text


async def test_a_datagram_that_cannot_be_decoded_is_counted_and_the_next_one_is_handled(tmp_path: Path) -> None:
    meter = Meter()
    here, there = Notifications(tmp_path, 0, 2, meter), LocalBus(tmp_path, 1, 2, lambda datagram: None)
    sender = Notifications(tmp_path, 1, 2, Meter())
    received: list[object] = []
    here.subscribe({EventKind.PUSHED: received.append})
    here.bus.start()
    there.start()
    try:
        for datagram in (b"\xff\xfe", b"", b"\x93\x91\x96\xa1p\x01\x02\x00\xa3one\xa0\x90\xc4\x00"):
            there.send(datagram)
        sender.bus.start()
        sender.send([pushed(1, 2, 3)])
        here.drain()
    finally:
        here.bus.close()
        there.close()
        sender.bus.close()
    assert received == [pushed(1, 2, 3)]
    assert meter.notification_errors == {"datagram": 3}


async def test_ids_that_cannot_be_learnt_do_not_keep_events_from_being_handled(tmp_path: Path) -> None:
    meter = Meter()
    here, there = Notifications(tmp_path, 0, 2, meter), LocalBus(tmp_path, 1, 2, lambda datagram: None)
    received: list[object] = []
    here.subscribe({EventKind.PUSHED: received.append})

    def learn(hashes: bytes, spans: object) -> None:
        raise Broken

    here.subscribe_ids(learn)
    here.bus.start()
    there.start()
    try:
        there.send(encode_datagram(Datagram([pushed(1, 2, 3)], [(2, 0, 3)], b"12345678")))
        here.drain()
    finally:
        here.bus.close()
        there.close()
    assert received == [pushed(1, 2, 3)]
    assert meter.notification_errors == {"datagram": 1}


async def test_own_and_received_events_may_have_handlers_of_their_own(tmp_path: Path) -> None:
    here, there = Notifications(tmp_path, 0, 2, Meter()), Notifications(tmp_path, 1, 2, Meter())
    calls: list[str] = []
    here.subscribe({EventKind.PARTITION_GONE: lambda event: calls.append("own")}, received=False)
    here.subscribe({EventKind.PARTITION_GONE: lambda event: calls.append("received")}, own=False)
    here.subscribe({EventKind.PARTITION_GONE: lambda event: calls.append("both")})
    here.bus.start()
    there.bus.start()
    try:
        here.publish([partition_gone(1, 2)])
        assert calls == ["own", "both"]
        there.send([partition_gone(1, 2)])
        here.drain()
    finally:
        here.bus.close()
        there.bus.close()
    assert calls == ["own", "both", "received", "both"]


async def test_events_of_other_hosts_go_to_their_shard_and_those_of_one_host_alone_are_not_believed(
    tmp_path: Path,
) -> None:
    first, second = Notifications(tmp_path, 0, 1, Meter()), Notifications(tmp_path, 0, 1, Meter())
    first.shards = (first, second)
    received: list[tuple[int, Event]] = []
    for shard, notifications in enumerate(first.shards):

        def note(event: Event, shard: int = shard) -> None:
            received.append((shard, event))

        notifications.subscribe({EventKind.PUSHED: note, EventKind.HELD: note})
    first.receive_hosts(
        [
            pushed(1, 2, 3),
            ("p", 4, 5, 0, 6, "\x011\x01"),
            ("p", 7, 8, 0, 9, "\x017\x01"),
            ("h", 1, 2, 3, 1000, ""),
            ("no such kind", 1, 2, 3, 4, ""),
        ]
    )
    assert received == [(0, pushed(1, 2, 3)), (1, pushed(4, 5, 6))]


def test_shards_that_are_no_numbers_are_passed_over() -> None:
    assert by_shard([("p", 1, 2, 0, 3, f"\x01{number}\x01") for number in ("", "x", "-1", "9" * 5000, "²")]) == {}
