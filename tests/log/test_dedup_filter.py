"""The filter of transaction ids: what it says was not pushed, was not."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.log import dedup_filter as overflow
from queen.log.dedup_filter import DedupFilter, Hashes, SpillFile
from queen.wire.segment import transaction_hash


def hashes_of(*ids: str, partition: int = 1) -> Hashes:
    return np.array([transaction_hash(id, partition) for id in ids], dtype=np.uint64)


def random_hashes(count: int, seed: int) -> Hashes:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)


def maybe(seen: DedupFilter, hashes: Hashes) -> npt.NDArray[np.bool_]:
    """For each hash: whether it may have been added."""
    found = np.zeros(len(hashes), dtype=np.bool_)
    found[seen.may_contain(hashes.tolist())] = True
    return found


@settings(max_examples=30)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=50))
def test_what_was_added_is_found(ids: list[str]) -> None:
    seen = DedupFilter(1 << 20)
    seen.add(hashes_of(*ids))
    assert maybe(seen, hashes_of(*ids)).all()


def test_ids_added_one_by_one_are_found_in_bulk_and_the_other_way_round() -> None:
    hashes = random_hashes(1000, 3)
    singly, at_once = DedupFilter(1 << 20), DedupFilter(1 << 20)
    for value in hashes:
        singly.add(np.array([value], dtype=np.uint64))
    at_once.add(hashes)
    assert maybe(singly, hashes).all()
    assert all(maybe(at_once, hashes[index : index + 1]).all() for index in range(len(hashes)))
    strangers = random_hashes(1000, 4)
    assert [bool(maybe(at_once, strangers[i : i + 1])[0]) for i in range(1000)] == maybe(at_once, strangers).tolist()


def test_the_same_id_in_another_partition_is_another_id() -> None:
    seen = DedupFilter(1 << 20)
    seen.add(hashes_of("t-1", partition=1))
    assert not maybe(seen, hashes_of("t-1", partition=2)).any()


def test_an_empty_filter_holds_nothing() -> None:
    seen = DedupFilter(1 << 20)
    assert not maybe(seen, random_hashes(1000, 1)).any()
    seen.add(np.array([], dtype=np.uint64))
    assert not maybe(seen, random_hashes(1000, 1)).any()


def test_nothing_added_is_forgotten_while_memory_lasts() -> None:
    seen = DedupFilter(64 << 20)
    added = [random_hashes(100_000, seed) for seed in range(5)]
    for several in added:
        seen.add(several)
    assert all(maybe(seen, several).all() for several in added)
    assert seen.complete_since == 0.0


def test_absent_are_rarely_suspected() -> None:
    seen = DedupFilter(64 << 20)
    seen.add(random_hashes(500_000, 1))
    assert maybe(seen, random_hashes(100_000, 2)).mean() < 0.001


def test_memory_is_bounded_and_what_was_dropped_is_owned_up_to() -> None:
    seen = DedupFilter(4 << 20)
    before = time.time()
    newest = random_hashes(1000, 0)
    for seed in range(40):
        newest = random_hashes(100_000, seed)
        seen.add(newest)
    assert seen.nbytes <= 16 << 20
    assert before <= seen.complete_since <= time.time()
    assert maybe(seen, newest).all()


def test_old_generations_are_dropped_and_the_newest_is_kept() -> None:
    seen = DedupFilter(64 << 20)
    seen.add(random_hashes(300_000, 1))
    newest = random_hashes(10, 2)
    seen.add(newest)
    seen.drop_before(time.time() + 1)
    assert maybe(seen, newest).all()
    assert seen.complete_since > 0


def test_what_memory_has_no_room_for_is_found_on_disk(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "made" / "yet"
    room = SpillFile(directory, 64 << 20)
    seen = DedupFilter(2 << 20, room)
    added = [random_hashes(20_000, seed) for seed in range(100)]
    for several in added:
        seen.add(several)
    assert seen.nbytes <= 2 << 20 < seen.disk_bytes
    assert seen.complete_since == 0.0
    assert all(maybe(seen, several).all() for several in added)
    assert all(seen.may_contain([int(several[0])]) == [0] for several in added)
    assert maybe(seen, random_hashes(100_000, 1000)).mean() < 0.001
    assert not list(directory.iterdir()), "nothing is left behind by whoever ends"


def test_when_the_disk_is_full_too_the_oldest_go_and_their_place_is_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = SpillFile(tmp_path, 4 << 20)
    seen = DedupFilter(2 << 20, room)
    with caplog.at_level(logging.WARNING):
        for seed in range(200):
            seen.add(random_hashes(20_000, seed))
            assert room.nbytes <= 4 << 20
    assert seen.complete_since > 0
    assert maybe(seen, random_hashes(20_000, 199)).all()
    assert [record.getMessage().count("DEDUP_DISK_MB") for record in caplog.records] == [1], "told once"
    seen.drop_before(time.time() + 1)
    assert room.nbytes == 0


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["foresee", "add", "add many"]), st.lists(st.integers(0, 40), max_size=12)),
        max_size=40,
    )
)
def test_what_was_foreseen_and_added_since_is_no_stranger(steps: list[tuple[str, list[int]]]) -> None:
    seen = DedupFilter(1 << 20)
    known = random_hashes(41, 7).tolist()
    added: set[int] = set()
    for what, which in steps:
        values = [known[index] for index in which]
        if what == "foresee":
            seen.check_ahead(values)
        else:
            seen.add(values if what == "add" else np.array(values * 60, dtype=np.uint64))
            added.update(values)
        expected = [index for index, value in enumerate(known) if value in added]
        assert set(expected) <= set(seen.may_contain(known))
        assert all(seen.may_contain([known[index]]) == [0] for index in expected)


def test_what_was_foreseen_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DedupFilter(1 << 20)
    seen.add(random_hashes(1000, 1))
    strangers, late = random_hashes(40, 2).tolist(), random_hashes(12, 3).tolist()
    for value in strangers:
        seen.check_ahead([value])
    looked_for: list[list[int]] = []

    def look_for(values: list[int]) -> list[int]:
        looked_for.append(values)
        return [0]

    monkeypatch.setattr(seen, "_look_for", look_for)
    assert seen.may_contain(strangers) == []
    assert seen.may_contain(strangers + late) == [40]
    assert looked_for == [late]


def test_ids_that_are_refused_again_and_again_are_not_remembered_for_ever() -> None:
    seen = DedupFilter(1 << 20)
    for value in range(30_000):
        seen.check_ahead([value])
    assert len(seen._absent) <= 10_001


@settings(max_examples=30)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(0, 1 << 30))
def test_batches_of_any_size_are_found_at_once_and_in_their_time(sizes: list[int], seed: int) -> None:
    """Small batches are gathered before their bits are set."""
    seen = DedupFilter(1 << 20)
    hashes = random_hashes(sum(sizes), seed)
    at = 0
    for moment, size in enumerate(sizes):
        batch = hashes[at : at + size]
        assert not maybe(seen, batch).mean() > 0.2
        seen.add(batch.tolist() if moment % 3 else batch, moment, moment + 1)
        at += size
        assert maybe(seen, hashes[:at]).all()
        one = int(batch[-1])
        assert seen.may_contain([one]) == [0]
        assert any(since <= moment and moment + 1 <= until for since, until in seen.when(one))


def test_without_any_room_on_disk_the_log_tells_that_ids_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = DedupFilter(2 << 20, SpillFile(tmp_path, 0))
    with caplog.at_level(logging.WARNING):
        for seed in range(100):
            seen.add(random_hashes(20_000, seed))
    assert seen.complete_since > 0
    assert [record.getMessage().count("DEDUP_DISK_MB") for record in caplog.records] == [1], "told once"


def test_a_disk_that_is_nearly_full_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 30))
    seen = DedupFilter(2 << 20, SpillFile(tmp_path, 64 << 20))
    for seed in range(50):
        seen.add(random_hashes(20_000, seed))
    assert seen.disk_bytes == 0
    assert seen.complete_since > 0


def test_a_write_that_fails_half_way_loses_what_was_being_written_and_owns_up_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SpillFile(tmp_path, 64 << 20)
    seen = DedupFilter(2 << 20, room)
    steps = 0

    def fail_at_the_third(move: overflow.Move) -> overflow.Bytes | None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise OSError(errno.ENOSPC, "no space left")
        return step(move)

    step = overflow.Move.step
    monkeypatch.setattr(overflow.Move, "step", fail_at_the_third)
    for seed in range(100):
        seen.add(random_hashes(20_000, seed))
    assert steps > 3, "later ones are written again"
    assert seen.complete_since > 0
    assert maybe(seen, random_hashes(20_000, 99)).all()
    seen.drop_before(time.time() + 1)
    assert room.nbytes == 0
