"""Files are added and swapped by whole commits: what a crash leaves is finished, and readers are not disturbed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from queen.pipelines import manifest as module
from queen.pipelines.errors import ArchiveError
from queen.pipelines.jobs.compact import compact
from queen.pipelines.manifest import Manifest, Snapshot


def _stage(manifest: Manifest, *files: tuple[str, list[int]]) -> tuple[Path, list[int]]:
    """Files of numbers, as a writer stages them."""
    staged = manifest.staging()
    for name, numbers in files:
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"n": numbers}), path)
    return staged, [len(numbers) for _, numbers in sorted(files)]


def _commit(manifest: Manifest, batch: int, numbers: list[int], writer: str = "w") -> Snapshot:
    return manifest.commit(writer, batch, *_stage(manifest, (f"day={batch}/x.parquet", numbers)))


def _plain(root: Path) -> list[int]:
    """What a reader of the plain directory sees."""
    files = [path for path in root.rglob("*.parquet") if not path.relative_to(root).parts[0].startswith("_")]
    return sorted(n for path in files for n in pyarrow.parquet.read_table(path, partitioning=None)["n"].to_pylist())


def _listed(manifest: Manifest) -> list[int]:
    """What a reader of the manifest sees."""
    with manifest.reading() as snapshot:
        paths = [manifest.root / file.path for file in snapshot.files]
        return sorted(n for path in paths for n in pyarrow.parquet.read_table(path, partitioning=None)["n"].to_pylist())


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    made = Manifest(tmp_path / "data")
    made.create()
    return made


def test_batches_are_added_once_however_often_they_are_tried(manifest: Manifest) -> None:
    _commit(manifest, 0, [1, 2])
    _commit(manifest, 0, [1, 2])
    _commit(manifest, 1, [3])
    _commit(manifest, 0, [1, 2])
    _commit(manifest, 0, [9], writer="another")
    assert _plain(manifest.root) == _listed(manifest) == [1, 2, 3, 9]
    assert list((manifest.root / "_staging").iterdir()) == []


def test_many_commits_are_summed_up_and_nothing_is_forgotten(manifest: Manifest) -> None:
    for batch in range(120):
        _commit(manifest, batch, [batch])
    assert len(list((manifest.root / "_manifest").glob("[0-9]*.json"))) == 20
    assert _listed(manifest) == list(range(120))
    assert manifest.last_batch("w") == 119


def _killed_before(step: str, work: Callable[[], object]) -> None:
    """Run `work` in a process that is killed before it does that to a file: `rename <from> <to>` or `unlink <file>`."""

    def run() -> None:
        def dying(event: str, arguments: tuple[object, ...]) -> None:
            names = [Path(str(one)).name for one in arguments if isinstance(one, str | os.PathLike)]
            if f"{event.removeprefix('os.').replace('remove', 'unlink')} {' '.join(names)}" == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(dying)
        work()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("step", "stored"),
    [
        # Before the intent has its name nothing has happened; afterwards everything will.
        ("rename 00000002.intent.tmp 00000002.intent", False),
        ("rename x.parquet 00000002-0.parquet", True),
        ("rename y.parquet 00000002-1.parquet", True),
        ("rename 00000002.intent 00000002.json", True),
    ],
)
def test_a_commit_that_is_killed_is_there_as_a_whole_or_not_at_all(manifest: Manifest, step: str, stored: bool) -> None:
    _commit(manifest, 0, [1])
    staged, rows = _stage(manifest, ("a=1/x.parquet", [2, 3]), ("a=2/y.parquet", [4]))
    _killed_before(step, lambda: manifest.commit("w", 1, staged, rows))
    seen = _plain(manifest.root)
    assert len(set(seen)) == len(seen)
    # Whoever comes next finishes it; trying the batch again adds it once.
    assert _listed(manifest) == ([1, 2, 3, 4] if stored else [1])
    assert manifest.last_batch("w") == (1 if stored else 0)
    manifest.commit("w", 1, *_stage(manifest, ("a=1/x.parquet", [2, 3]), ("a=2/y.parquet", [4])))
    assert _plain(manifest.root) == _listed(manifest) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("step", "swapped"),
    [
        ("rename 00000003.intent.tmp 00000003.intent", False),
        ("unlink 00000001-0.parquet", True),
        ("unlink 00000002-0.parquet", True),
        ("rename joined.parquet 00000003-0.parquet", True),
        ("rename 00000003.intent 00000003.json", True),
    ],
)
def test_a_swap_of_files_that_is_killed_shows_the_old_or_the_new(manifest: Manifest, step: str, swapped: bool) -> None:
    _commit(manifest, 0, [1])
    before = _commit(manifest, 1, [2])
    staged, rows = _stage(manifest, ("day=0/joined.parquet", [1, 2]))
    old = [file.path for file in before.files]
    _killed_before(step, lambda: manifest.commit("compaction", 0, staged, rows, removed=old))
    seen = _plain(manifest.root)
    assert len(set(seen)) == len(seen)
    assert _listed(manifest) == _plain(manifest.root) == [1, 2]
    assert len(manifest.snapshot().files) == (1 if swapped else 2)


def test_files_stay_while_they_are_read_and_additions_do_not_wait(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_READERS_SECONDS", 0.2)
    first = _commit(manifest, 0, [1])
    old = [file.path for file in first.files]
    with manifest.reading() as snapshot:
        _commit(manifest, 1, [2])
        staged, rows = _stage(manifest, ("day=0/joined.parquet", [1]))
        with pytest.raises(ArchiveError, match="is being read"):
            manifest.commit("compaction", 0, staged, rows, removed=old)
        assert all((manifest.root / file.path).exists() for file in snapshot.files)
    manifest.commit("compaction", 0, staged, rows, removed=old)
    assert _plain(manifest.root) == _listed(manifest) == [1, 2]


def test_a_reader_sees_all_files_of_a_commit_or_none_while_others_write_and_swap(manifest: Manifest) -> None:
    def write() -> None:
        for batch in range(60):
            manifest.commit("w", batch, *_stage(manifest, ("a/x.parquet", [batch]), ("b/y.parquet", [batch])))

    def swap() -> None:
        for number in range(15):
            files = manifest.snapshot().files
            numbers = [
                n
                for file in files
                for n in pyarrow.parquet.read_table(manifest.root / file.path, partitioning=None)["n"].to_pylist()
            ]
            staged, rows = _stage(manifest, ("a/joined.parquet", numbers))
            if files:
                manifest.commit("compaction", number, staged, rows, removed=[file.path for file in files])

    threads = [threading.Thread(target=work) for work in (write, swap)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen = _listed(manifest)
        assert seen == sorted([*range(len(seen) // 2)] * 2)
        # Who swaps files gets its turn when nobody reads.
        time.sleep(0.02)
    assert _plain(manifest.root) == _listed(manifest) == sorted([*range(60)] * 2)


def test_small_files_of_an_hour_are_joined_up_to_the_wanted_size(manifest: Manifest) -> None:
    hour = "queue=orders/date=2026-01-01/hour=10"
    for batch in range(5):
        manifest.commit("w", batch, *_stage(manifest, (f"{hour}/x.parquet", [2 * batch, 2 * batch + 1])))
    manifest.commit("w", 5, *_stage(manifest, ("queue=orders/date=2026-01-01/hour=11/x.parquet", [10])))
    sizes = [file.bytes for file in manifest.snapshot().files]
    # Two fit into one; the fifth has none to join, and neither has the one of the next hour.
    done = compact(f"file://{manifest.root}", 2 * max(sizes))
    assert (done.files_before, done.files_after) == (4, 2)
    assert len(manifest.snapshot().files) == 4
    assert _plain(manifest.root) == _listed(manifest) == list(range(11))


def test_what_killed_runs_left_behind_is_collected(manifest: Manifest) -> None:
    staged, _ = _stage(manifest, ("a/x.parquet", [1]))
    assert manifest.collect_orphans() == 0
    assert manifest.collect_orphans(older_than=-1) == 1
    assert not staged.exists()


def test_a_directory_without_a_manifest_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="is not an archive"):
        Manifest(tmp_path).snapshot()


def test_a_damaged_manifest_is_refused_and_not_guessed(manifest: Manifest) -> None:
    _commit(manifest, 0, [1])
    (manifest.root / "_manifest" / "00000001.json").write_text("{")
    with pytest.raises(ArchiveError, match=r"00000001\.json cannot be read"):
        manifest.snapshot()
