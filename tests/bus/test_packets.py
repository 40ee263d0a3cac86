"""Packets between hosts: what is sent arrives as it was, and nothing else gets in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen.bus.members import Members, Tracked
from queen.bus.packets import (
    FRESH_SECONDS,
    Event,
    Heartbeat,
    Packet,
    PacketRefusal,
    PacketRefused,
    PacketSigner,
    PacketValidator,
    PacketWriter,
    ReplayGuard,
    boot_number,
    plain_frame,
)
from queen.bus.udp import DATAGRAM_BYTES

KEY, OTHER = b"k" * 32, b"o" * 32
numbers = st.integers(0, 2**63 - 1)
events = st.tuples(st.text(max_size=2), numbers, numbers, numbers, numbers, st.text(max_size=300))


def refusal(validator: PacketValidator, frame: bytes) -> PacketRefusal | None:
    try:
        validator.admit(frame)
    except PacketRefused as refused:
        return refused.reason
    return None


@given(st.lists(events, max_size=200), st.sampled_from([(), (KEY,)]))
def test_events_arrive_as_they_were_sent(sent: list[Event], keys: tuple[bytes, ...]) -> None:
    frames = list(PacketWriter(7, PacketSigner(keys)).events(sent, DATAGRAM_BYTES))
    validator = PacketValidator(PacketSigner(keys))
    arrived: list[Event] = []
    for frame, count in frames:
        packet, _ = validator.admit(frame)
        assert packet.boot == 7
        assert len(packet.events) == count
        assert len(frame) <= DATAGRAM_BYTES or count == 1
        arrived += packet.events
    assert arrived == sent


@given(st.binary(max_size=300), st.sampled_from([(), (KEY,)]))
def test_any_bytes_are_refused_or_are_a_packet(data: bytes, keys: tuple[bytes, ...]) -> None:
    for frame in (data, plain_frame(data), PacketSigner((KEY,)).sign(data)):
        assert refusal(PacketValidator(PacketSigner(keys)), frame) in (None, *PacketRefusal)


@given(st.data())
def test_a_packet_that_was_damaged_is_refused(data: st.DataObject) -> None:
    writer = PacketWriter(7, PacketSigner((KEY,)))
    ((frame, _),) = writer.events([("p", 1, 2, 3, 4, "name")], DATAGRAM_BYTES)
    place = data.draw(st.integers(0, len(frame) - 1))
    flipped = data.draw(st.integers(1, 255))
    damaged = frame[:place] + bytes([frame[place] ^ flipped]) + frame[place + 1 :]
    assert refusal(PacketValidator(PacketSigner((KEY,))), damaged) is not None
    assert refusal(PacketValidator(PacketSigner((KEY,))), frame[:place]) is not None
    assert refusal(PacketValidator(PacketSigner((KEY,))), frame) is None


@pytest.mark.parametrize("numbers", [(-1, 0), (0, 2**63), (0, 2**64 - 1)])
def test_numbers_that_the_database_could_not_take_are_malformed(numbers: tuple[int, int]) -> None:
    ((frame, _),) = PacketWriter(7, PacketSigner(())).events([("p", 1, *numbers, 1, "")], DATAGRAM_BYTES)
    assert refusal(PacketValidator(PacketSigner(())), frame) is PacketRefusal.MALFORMED


def test_with_a_secret_only_the_right_signature_gets_in() -> None:
    validator = PacketValidator(PacketSigner((KEY,)))
    heartbeat = Heartbeat("a:1", "b:2")
    assert refusal(validator, PacketWriter(7, PacketSigner(())).heartbeat(heartbeat)) is PacketRefusal.UNSIGNED
    assert refusal(validator, PacketWriter(7, PacketSigner((OTHER,))).heartbeat(heartbeat)) is PacketRefusal.FORGED
    assert refusal(validator, PacketWriter(7, PacketSigner((KEY, OTHER))).heartbeat(heartbeat)) is None


def test_a_secret_can_be_changed_without_a_moment_of_deafness() -> None:
    heartbeat = Heartbeat("a:1", "b:2")
    changing = PacketValidator(PacketSigner((OTHER, KEY)))
    assert refusal(changing, PacketWriter(7, PacketSigner((KEY,))).heartbeat(heartbeat)) is None
    assert refusal(changing, PacketWriter(7, PacketSigner((OTHER,))).heartbeat(heartbeat)) is None
    assert (
        refusal(PacketValidator(PacketSigner(())), PacketWriter(7, PacketSigner((KEY,))).heartbeat(heartbeat)) is None
    )


def test_a_packet_gets_in_once() -> None:
    validator, writer = PacketValidator(PacketSigner((KEY,))), PacketWriter(7, PacketSigner((KEY,)))
    frames = [writer.heartbeat(Heartbeat("a:1", "b:2")) for _ in range(5)]
    assert [refusal(validator, frame) for frame in reversed(frames)] == [None] * 5
    assert [refusal(validator, frame) for frame in frames] == [PacketRefusal.REPLAYED] * 5


def test_what_another_worker_has_admitted_does_not_get_in_again() -> None:
    validator, colleague = PacketValidator(PacketSigner((KEY,))), PacketValidator(PacketSigner((KEY,)))
    frame = PacketWriter(7, PacketSigner((KEY,))).heartbeat(Heartbeat("a:1", "b:2"))
    packet, _ = colleague.admit(frame)
    validator.note(packet)
    assert refusal(validator, frame) is PacketRefusal.REPLAYED


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_packet_of_another_time_is_stale(hours: int) -> None:
    frame = PacketWriter(7, PacketSigner((KEY,))).heartbeat(Heartbeat("a:1", "b:2"))
    assert (
        refusal(PacketValidator(PacketSigner((KEY,)), lambda: time.time() + hours * 3600), frame) is PacketRefusal.STALE
    )
    assert refusal(PacketValidator(PacketSigner((KEY,)), lambda: time.time() + FRESH_SECONDS / 2), frame) is None


@given(st.lists(st.integers(0, 3000), max_size=100))
def test_a_sequence_number_is_admitted_at_most_once_and_in_order_always(sequences: list[int]) -> None:
    guard = ReplayGuard()
    newest, admitted = -1, set()
    for sequence in sequences:
        taken = guard.admit(1, sequence)
        if sequence > newest:
            assert taken
            newest = sequence
        assert not (taken and sequence in admitted)
        assert taken or sequence in admitted or newest - sequence >= 1024
        admitted.add(sequence)


def test_senders_do_not_get_in_each_others_way() -> None:
    guard = ReplayGuard()
    assert all(guard.admit(sender, 1) for sender in range(10_000))
    assert not guard.admit(9_999, 1)


def heartbeat(boot: int, name: str, *, leaving: bool = False) -> Packet:
    return Packet(boot, 1, 1, 1, [], Heartbeat(name, "there", leaving))


def test_a_silent_host_is_dead_until_it_sends_again() -> None:
    members = Members(dead_after=5)
    members.received(heartbeat(1, "a"), 0)
    members.received(heartbeat(2, "b"), 4)
    assert members.count(5.5) == Tracked(2, 1, 1)
    members.received(Packet(1, 1, 2, 1, []), 6)
    assert members.count(6) == Tracked(2, 2, 0)
    assert (members.heartbeats, members.restarts) == (2, 0)
    assert members.count(2000) == Tracked(0, 0, 0)


def test_a_host_that_comes_back_under_its_name_was_restarted() -> None:
    members = Members(dead_after=5)
    members.received(heartbeat(1, "a"), 0)
    members.received(heartbeat(2, "a"), 3)
    assert (members.count(4), members.restarts) == (Tracked(2, 2, 0), 0)
    assert (members.count(6), members.restarts) == (Tracked(1, 1, 0), 1)


def test_a_host_that_says_good_bye_is_dead_at_once() -> None:
    members = Members(dead_after=5)
    members.received(heartbeat(1, "a"), 0)
    members.received(heartbeat(1, "a", leaving=True), 1)
    assert members.count(1) == Tracked(1, 0, 1)
    members.received(heartbeat(2, "a"), 1.1)
    assert (members.count(1.2), members.restarts) == (Tracked(1, 1, 0), 1)


def test_two_hosts_that_chose_the_same_name_are_two() -> None:
    members = Members(dead_after=5)
    for second in range(20):
        members.received(heartbeat(1, "localhost"), second)
        members.received(heartbeat(2, "localhost"), second)
    assert (members.count(20), members.restarts) == (Tracked(2, 2, 0), 0)


@pytest.mark.parametrize("name", ["", "x" * 301, "a\nb", "a\x1b[2Jb", "a\x00", "ünicode", "a\u202eb"])
def test_names_of_hosts_that_would_spoil_the_log_are_refused(name: str) -> None:
    frame = PacketWriter(7, PacketSigner(())).heartbeat(Heartbeat(name, "there"))
    assert refusal(PacketValidator(PacketSigner(())), frame) is PacketRefusal.MALFORMED


def test_hosts_that_are_made_up_have_an_end_and_those_known_before_stay_alive() -> None:
    members = Members(dead_after=5)
    members.received(heartbeat(1, "real"), 0)
    for boot in range(2, 5000):
        members.received(heartbeat(boot, f"forged {boot}"), 1)
    assert members.count(2).tracked == 1000
    members.received(heartbeat(1, "real"), 7)
    assert members.count(8) == Tracked(1000, 1, 999)
    # Which are forgotten when nothing has come of them for a while.
    members.received(heartbeat(1, "real"), 700)
    assert members.count(700) == Tracked(1, 1, 0)


def test_the_workers_of_a_host_have_one_number(tmp_path: Path) -> None:
    assert boot_number(tmp_path) == boot_number(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["boot"]
