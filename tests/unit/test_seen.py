"""The filter of transaction ids: what it says was not pushed, was not."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.broker.seen import Hashes, SeenFilter, transaction_hash


def hashes_of(*ids: str, partition: int = 1) -> Hashes:
    return np.array([transaction_hash(id, partition) for id in ids], dtype=np.uint64)


def random_hashes(count: int, seed: int) -> Hashes:
    return np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)


@settings(max_examples=30)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=50))
def test_what_was_added_is_found(ids: list[str]) -> None:
    seen = SeenFilter(1 << 20)
    seen.add(hashes_of(*ids))
    assert seen.maybe(hashes_of(*ids)).all()


def test_ids_added_one_by_one_are_found_in_bulk_and_the_other_way_round() -> None:
    hashes = random_hashes(1000, 3)
    singly, at_once = SeenFilter(1 << 20), SeenFilter(1 << 20)
    for value in hashes:
        singly.add(np.array([value], dtype=np.uint64))
    at_once.add(hashes)
    assert singly.maybe(hashes).all()
    assert all(at_once.maybe(hashes[index : index + 1]).all() for index in range(len(hashes)))
    strangers = random_hashes(1000, 4)
    assert [bool(at_once.maybe(strangers[i : i + 1])[0]) for i in range(1000)] == at_once.maybe(strangers).tolist()


def test_the_same_id_in_another_partition_is_another_id() -> None:
    seen = SeenFilter(1 << 20)
    seen.add(hashes_of("t-1", partition=1))
    assert not seen.maybe(hashes_of("t-1", partition=2)).any()


def test_an_empty_filter_holds_nothing() -> None:
    seen = SeenFilter(1 << 20)
    assert not seen.maybe(random_hashes(1000, 1)).any()
    seen.add(np.array([], dtype=np.uint64))
    assert not seen.maybe(random_hashes(1000, 1)).any()


def test_nothing_added_is_forgotten_while_memory_lasts() -> None:
    seen = SeenFilter(64 << 20)
    added = [random_hashes(100_000, seed) for seed in range(5)]
    for several in added:
        seen.add(several)
    assert all(seen.maybe(several).all() for several in added)
    assert seen.complete_since == 0.0


def test_strangers_are_rarely_suspected() -> None:
    seen = SeenFilter(64 << 20)
    seen.add(random_hashes(500_000, 1))
    assert seen.maybe(random_hashes(100_000, 2)).mean() < 0.001


def test_memory_is_bounded_and_what_was_dropped_is_owned_up_to() -> None:
    seen = SeenFilter(4 << 20)
    before = time.time()
    newest = random_hashes(1000, 0)
    for seed in range(40):
        newest = random_hashes(100_000, seed)
        seen.add(newest)
    assert seen.nbytes <= 16 << 20
    assert before <= seen.complete_since <= time.time()
    assert seen.maybe(newest).all()


def test_old_generations_are_dropped_and_the_newest_is_kept() -> None:
    seen = SeenFilter(64 << 20)
    seen.add(random_hashes(300_000, 1))
    newest = random_hashes(10, 2)
    seen.add(newest)
    seen.drop_before(time.time() + 1)
    assert seen.maybe(newest).all()
    assert seen.complete_since > 0
