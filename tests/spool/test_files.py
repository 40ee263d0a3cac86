"""The spool on disk: whole records come back in order, whatever happened to the rest of the file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queen.spool.files import (
    FAILED,
    directories,
    file_header,
    file_records,
    frame,
    left_records,
    spool_files,
    write_durably,
)
from queen.spool.reader import SpoolReader, Taken
from queen.spool.record import Record, bucket_of, decode_record, encode_record
from queen.spool.shared_state import SharedSpoolState
from queen.spool.spool import Spool
from queen.spool.writer import SpoolRefused, SpoolWriter
from tests.spool.records import record
from tests.support.ageing import until


def numbers(taken: list[Taken]) -> list[int]:
    return [int.from_bytes(one.record.block, "big") for one in taken]


def open_spool(root: Path, records_per_file: int = 1000, most_bytes: int = 1 << 20) -> Spool:
    return Spool(root, records_per_file=records_per_file, most_bytes=most_bytes)


async def append(spool: Spool, *records: Record) -> None:
    await spool.writer.append(records, due_at=0.0, flush_at=1)


def replay(spool: Spool) -> list[int]:
    """Take and settle everything, as the replayer does."""
    spool.reader.begin({})
    found = []
    while taken := spool.reader.take(3, 1 << 20):
        found += numbers(taken)
        spool.reader.settle(taken)
    spool.reader.remove_finished()
    spool.reader.clear_if_drained()
    return found


@pytest.fixture
def board(tmp_path: Path) -> Iterator[SharedSpoolState]:
    board = SharedSpoolState(tmp_path)
    board.join(list)
    yield board
    board.close()


records = st.builds(
    Record,
    st.integers(0, 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.text(max_size=20),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 1024),
    st.lists(st.binary(min_size=16, max_size=16), max_size=3),
    st.binary(max_size=300),
)


@given(records)
def test_a_record_comes_back_as_it_went_in(one: Record) -> None:
    assert decode_record(encode_record(one)) == one


def test_records_of_several_files_come_back_in_the_order_they_were_accepted(tmp_path: Path) -> None:
    async def write() -> None:
        spools = [open_spool(tmp_path, records_per_file=3) for _ in range(3)]
        for number in range(20):
            await append(spools[number % 3], record(number))
        assert spools[0].state.records == 20
        assert spools[0].state.holds([bucket_of("q", "p")])
        assert not spools[0].state.holds([bucket_of("q", "elsewhere")])
        assert replay(spools[1]) == list(range(20))
        assert spools[0].state.records == 0
        assert not spools[0].state.engaged
        assert spools[0].stats().replayed_messages == 20
        for spool in spools:
            await spool.close()

    asyncio.run(write())


def test_what_a_dead_process_left_is_counted_and_replayed_by_the_next(tmp_path: Path) -> None:
    async def write() -> None:
        first = open_spool(tmp_path)
        await append(first, record(1), record(2))
        await first.close()
        second = open_spool(tmp_path)
        assert (second.state.records, second.state.messages) == (2, 2)
        assert second.state.engaged
        assert second.state.due
        await append(second, record(3))
        assert replay(second) == [1, 2, 3]
        assert not second.state.engaged
        await second.close()

    asyncio.run(write())


def test_a_replay_of_unknown_outcome_goes_on_where_the_last_commit_ended(tmp_path: Path) -> None:
    async def write() -> None:
        spool = open_spool(tmp_path)
        await append(spool, *(record(number) for number in range(10)))
        reader = spool.reader
        reader.begin({})
        taken = reader.take(4, 1 << 20)
        file_id = taken[0].file_id
        reader.rewind({})
        assert numbers(reader.take(4, 1 << 20)) == [0, 1, 2, 3], "nothing of it was stored"
        reader.rewind({file_id: taken[3].end})
        assert spool.state.records == 6, "all of it was stored after all"
        taken = reader.take(2, 1 << 20)
        assert numbers(taken) == [4, 5]
        reader.settle(taken)
        # A process that begins later knows from PostgreSQL how far the file was replayed.
        reader.begin({file_id: taken[1].end})
        assert numbers(reader.take(100, 1 << 20)) == [6, 7, 8, 9]
        await spool.close()

    asyncio.run(write())


def test_a_file_cut_off_at_any_byte_gives_every_whole_record_and_keeps_the_rest_aside(tmp_path: Path) -> None:
    whole, ends = _dead_file(tmp_path / "made", 4)
    for length in range(len(whole) + 1):
        root = tmp_path / str(length)
        path = _put_file(root, whole[:length])
        expected = [number for number, end in enumerate(ends) if end <= length]
        assert _replay_directory(root) == expected, length
        begun = max([0, *(end for end in (24, *ends) if end <= length)])
        kept = b"".join(path.read_bytes() for path in sorted((root / "damaged").glob("*.bin")))
        assert kept == (whole[begun:length] if length >= 24 else whole[:length]), length
        assert not path.exists()
        shutil.rmtree(root)


def test_a_flipped_byte_costs_its_record_alone(tmp_path: Path) -> None:
    whole, ends = _dead_file(tmp_path / "made", 3)
    starts = [24, *ends[:-1]]
    for position in range(24, len(whole)):
        root = tmp_path / str(position)
        broken = bytearray(whole)
        broken[position] ^= 0x41
        _put_file(root, bytes(broken))
        hit = next(number for number, end in enumerate(ends) if position < end)
        assert _replay_directory(root) == [number for number in range(3) if number != hit], position
        (kept,) = (root / "damaged").glob("*.bin")
        assert kept.read_bytes() == broken[starts[hit] : ends[hit]]
        shutil.rmtree(root)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_is_done_to_a_file_only_whole_records_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("spool")
    whole, _ = _dead_file(root / "made", 8)
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(broken) - 1))
        kind = data.draw(st.sampled_from(["flip", "insert", "remove"]))
        if kind == "flip":
            broken[position] ^= data.draw(st.integers(1, 255))
        elif kind == "insert":
            broken[position:position] = data.draw(st.binary(max_size=50))
        else:
            del broken[position : position + data.draw(st.integers(1, 50))]
    _put_file(root / "spool", bytes(broken))
    found = _replay_directory(root / "spool")
    assert found == sorted(set(found))
    assert set(found) <= set(range(8))
    shutil.rmtree(root)


def test_bytes_in_a_payload_that_look_like_a_record_are_not_taken_for_one(tmp_path: Path) -> None:
    forged = frame(encode_record(record(99)), uuid.uuid4())
    file_id = uuid.uuid4()
    frames = [frame(encode_record(record(number, forged)), file_id) for number in range(3)]
    broken = bytearray(file_header(file_id) + b"".join(frames))
    broken[24 + 4] ^= 0xFF
    _put_file(tmp_path / "spool", bytes(broken), file_id)
    assert _replay_directory(tmp_path / "spool") == [1, 2]


def test_what_a_live_process_is_writing_is_left_to_it(tmp_path: Path) -> None:
    async def write() -> None:
        spool = open_spool(tmp_path)
        await append(spool, record(1))
        (path,) = _files(tmp_path)
        size = path.stat().st_size
        with path.open("ab") as file:
            file.write(b"half a record")
        assert replay(spool) == [1]
        assert path.exists()
        os.truncate(path, size)
        await append(spool, record(2))
        assert numbers(spool.reader.take(9, 1 << 20)) == [2]
        await spool.close()

    asyncio.run(write())


def test_a_spool_takes_no_more_than_it_may_hold(tmp_path: Path) -> None:
    async def write() -> None:
        spool = open_spool(tmp_path, most_bytes=10_000)
        await append(spool, record(1, bytes(6000)))
        with pytest.raises(SpoolRefused, match="FILE_BUFFER_MAX_MB"):
            await append(spool, record(2, bytes(6000)))
        await append(spool, record(3, bytes(1000)))
        assert replay(spool) == [1, 3]
        await append(spool, record(4, bytes(6000)))
        await spool.close()

    asyncio.run(write())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        _run(f"mount -t tmpfs -o size=64k none {disk}")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small disk cannot be mounted here")
    yield disk
    _run(f"umount -l {disk}")


def test_a_full_disk_refuses_and_loses_nothing_that_was_answered(small_disk: Path) -> None:
    async def write() -> None:
        spool = open_spool(small_disk)
        answered = []
        for number in range(30):
            try:
                await append(spool, record(number, os.urandom(4000)))
                answered.append(number)
            except SpoolRefused as error:
                assert "No space left" in str(error)
        assert 0 < len(answered) < 30
        assert not spool.stats().healthy
        assert spool.state.records == len(answered)
        assert replay(spool) == answered
        await append(spool, record(99))
        assert spool.stats().healthy
        assert replay(spool) == [99]
        await spool.close()

    asyncio.run(write())


async def test_a_disk_that_has_room_again_is_noticed_without_a_push(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.spool.writer._TRY_SECONDS", 0.01)
    monkeypatch.setattr("queen.spool.writer._TRIED_BYTES", 4096)
    spool = open_spool(small_disk)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(1 << 20))
    with pytest.raises(SpoolRefused):
        await append(spool, record(1, os.urandom(4000)))
    assert not spool.stats().healthy
    filler.unlink()
    await until(lambda: spool.stats().healthy)
    await append(spool, record(2))
    assert replay(spool) == [2]
    await spool.close()


def test_a_disk_that_is_full_from_the_start_refuses_and_says_so(small_disk: Path, tmp_path: Path) -> None:
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filler, bytes(1024))
    os.close(filler)
    spool = Spool.open(small_disk, tmp_path / "spare", records_per_file=9, most_bytes=1 << 20)
    assert not spool.stats().healthy
    with pytest.raises(SpoolRefused, match="No space left"):
        asyncio.run(append(spool, record(1)))
    asyncio.run(spool.close())


def test_a_read_only_disk_refuses_and_says_so(small_disk: Path, tmp_path: Path) -> None:
    _run(f"mount -o remount,ro {small_disk}")

    async def write() -> None:
        spool = Spool.open(small_disk / "spool", tmp_path / "spare", records_per_file=9, most_bytes=1 << 20)
        assert not spool.stats().healthy
        with pytest.raises(SpoolRefused, match="Read-only"):
            await append(spool, record(2))
        await spool.close()

    asyncio.run(write())


def test_a_record_that_was_set_aside_says_why_and_comes_back(tmp_path: Path) -> None:
    spool = open_spool(tmp_path)
    spool.failed.add(record(1), "the queue is full")
    spool.failed.add(record(1), "the queue is still full")
    (failed,) = spool.failed.read()
    assert failed.record.reason == "the queue is still full"
    assert spool.failed.count()[0] == 1
    assert "still full" in next((tmp_path / FAILED).glob("*.json")).read_text()
    spool.failed.remove(failed)
    assert list((tmp_path / FAILED).iterdir()) == []
    asyncio.run(spool.close())


def test_a_batch_whose_writer_died_in_the_middle_is_not_stored(board: SharedSpoolState, tmp_path: Path) -> None:
    """What it counted but never wrote delays no request once the spool is empty."""
    with board.locked():
        board.accept([record(1)], 100, 0.0, 1)
    assert board.engaged
    reader = SpoolReader(tmp_path, board)
    reader.begin({})
    assert reader.take(10, 1 << 20) == []
    assert reader.clear_if_drained()
    assert not board.engaged
    assert not board.holds([bucket_of("q", "p")])


def _dead_file(root: Path, count: int) -> tuple[bytes, list[int]]:
    """The bytes of a file with so many records, and where each of them ends."""

    async def write() -> None:
        spool = open_spool(root)
        for number in range(count):
            await append(spool, record(number, bytes([number]) * (number * 3 + 1)))
        await spool.close()

    asyncio.run(write())
    (path,) = _files(root)
    sizes = [nbytes for _, nbytes in file_records(path)]
    return path.read_bytes(), [24 + sum(sizes[: number + 1]) for number in range(count)]


def _put_file(root: Path, content: bytes, file_id: uuid.UUID | None = None) -> Path:
    """A file as a process that died has left it."""
    directory = root / str(uuid.uuid4())
    directory.mkdir(parents=True)
    path = directory / f"{file_id or uuid.UUID(bytes=content[8:24].ljust(16, b'-'))}.buf.tmp"
    write_durably(path, content)
    return path


def _replay_directory(root: Path) -> list[int]:
    spool = open_spool(root)
    counted = len(list(left_records(root)))
    assert spool.state.records == counted
    found = replay(spool)
    assert len(found) == counted
    assert not spool.state.engaged
    asyncio.run(spool.close())
    return found


def _files(root: Path) -> list[Path]:
    return sorted(path for directory in directories(root) for path in spool_files(directory))


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def test_a_file_is_finished_when_it_is_full_or_unused(board: SharedSpoolState, tmp_path: Path) -> None:
    def are_finished() -> bool:
        return all(path.suffix == ".buf" for path in _files(tmp_path))

    async def write() -> None:
        writer = SpoolWriter(tmp_path, board, records_per_file=2, most_bytes=1 << 20, idle_seconds=0.05)
        await writer.append([record(1), record(2)], due_at=0.0, flush_at=1)
        assert are_finished()
        await writer.append([record(3)], due_at=0.0, flush_at=1)
        assert [path.suffix for path in _files(tmp_path)] == [".buf", ".tmp"]
        await until(are_finished)
        await writer.close()

    asyncio.run(write())
    assert [int.from_bytes(one.block, "big") for one, _ in left_records(tmp_path)] == [1, 2, 3]
