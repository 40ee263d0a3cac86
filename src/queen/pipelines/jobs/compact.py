"""`queen pipeline compact`: many small files of an archive become few large ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Final

from queen.pipelines.archive_files import open_archive, place_of
from queen.pipelines.manifest import DataFile, Manifest, Snapshot, staged_files
from queen.pipelines.sinks import count_rows
from queen.pipelines.tables.locations import TARGET_BYTES
from queen.pipelines.tables.table import Compacted, packed

WRITER: Final = "compaction"
# An hour may still grow for a while after it has ended.
_SETTLED: Final = timedelta(hours=1, minutes=10)


def compact(
    root: str | Path,
    target_bytes: int = TARGET_BYTES,
    *,
    running_hour: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Compacted:
    """Join small files of one folder. Readers of the manifest see the old files or the new ones, never both.

    The hour that is being written is left alone, unless `running_hour`.
    """
    manifest = open_archive(root)
    manifest.collect_orphans()
    done = Compacted()
    groups = list(_groups(manifest.snapshot(), target_bytes, running_hour))
    for index, group in enumerate(groups):
        on_progress(index, len(groups))
        _join(manifest, group)
        done.files_before += len(group)
        done.files_after += 1
    on_progress(len(groups), len(groups))
    return done


def _groups(snapshot: Snapshot, target_bytes: int, running_hour: bool) -> Iterator[list[DataFile]]:
    """Small files of one folder that together are one file of the wanted size."""
    folders: dict[str, list[DataFile]] = {}
    now = datetime.now(UTC)
    for file in snapshot.files:
        if file.bytes < target_bytes and (running_hour or place_of(file)[1] + _SETTLED <= now):
            folders.setdefault(str(PurePosixPath(file.path).parent), []).append(file)
    for files in folders.values():
        yield from packed(
            sorted(files, key=lambda file: (file.commit, file.path)), lambda file: file.bytes, target_bytes
        )


def _join(manifest: Manifest, group: Sequence[DataFile]) -> None:
    import pyarrow.parquet

    staged = manifest.staging()
    target = staged / PurePosixPath(group[0].path).parent / "joined.parquet"
    target.parent.mkdir(parents=True)
    paths = [manifest.root / file.path for file in group]
    schema = pyarrow.parquet.read_schema(paths[0])
    # In the order of their commits, so that the messages of a partition stay in order.
    with pyarrow.parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for path in paths:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches():
                    writer.write_batch(batch)
    number = manifest.snapshot().batches.get(WRITER, -1) + 1
    rows = [count_rows(file) for file in staged_files(staged)]
    manifest.commit(WRITER, number, staged, rows, removed=[file.path for file in group])
