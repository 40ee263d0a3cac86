"""Delta and Iceberg tables: every batch is there once, whatever is killed; columns, versions and small files."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest

from queen.pipelines.declaration import ONCE
from queen.pipelines.errors import ArchiveError, DeclarationError, PipelineError, SchemaChange, TablesMissing
from queen.pipelines.jobs.archive import archive_declaration, sole_archiver
from queen.pipelines.jobs.reconcile import reconcile
from queen.pipelines.jobs.replay import ReplayOptions, replay
from queen.pipelines.loading import load
from queen.pipelines.session import Connection
from queen.pipelines.tables.delta import DeltaLake
from queen.pipelines.tables.files import _read, write_table
from queen.pipelines.tables.locations import Location
from queen.pipelines.tables.opening import Format, format_at, open_table
from queen.pipelines.tables.schemas import evolve
from queen.pipelines.tables.sink import LakeSink, newest
from queen.pipelines.tables.table import DELETED, Table
from tests.pipelines.running import Runner, in_process
from tests.support.api import Api

FORMATS = [pytest.param(kind, id=kind.value) for kind in (Format.DELTA, Format.ICEBERG)]


def rows_at(kind: Format, root: Path) -> list[dict[str, Any]]:
    """What pandas reads: through delta-rs, or PyIceberg without a catalog."""
    if kind is Format.DELTA:
        frame = deltalake.DeltaTable(str(root)).to_pandas()
    else:
        from pyiceberg.table import StaticTable

        frame = StaticTable.from_metadata(str(root)).scan().to_pandas()
    found: list[dict[str, Any]] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(Format.DELTA, id="delta", marks=pytest.mark.soak), pytest.param(Format.ICEBERG, id="iceberg")]
)
async def test_rows_are_appended_and_merged_and_new_fields_become_columns(kind: Format, runner: Runner) -> None:
    fields = "k string, n int, gone boolean"

    def file(fields: str) -> Path:
        return runner.file(
            f"""\
            pipeline: lake
            sources:
              events: {{files: DIR/in, schema: "{fields}", files_per_batch: 1}}
            sinks:
              all: {{from: events, {kind.value}: DIR/all, partition_by: k}}
              last: {{from: events, {kind.value}: DIR/last, key: k, order_by: n, delete_when: gone}}
            """
        )

    runner.batch({"k": "a", "n": 2}, {"k": "a", "n": 1}, {"k": "b/é", "n": 1}, {"k": "c", "n": 1})
    runner.batch({"k": "c", "n": 9}, {"k": "b/é", "n": 3, "gone": True}, {"k": "d"})
    await runner.run(file(fields))
    runner.batch({"k": "a", "n": 7, "city": "Rome"})
    await runner.run(file(f"{fields}, city string"))
    everything = sorted((row["k"], row["n"] or 0, row["city"]) for row in rows_at(kind, runner.directory / "all"))
    assert everything == [
        ("a", 1, None),
        ("a", 2, None),
        ("a", 7, "Rome"),
        ("b/é", 1, None),
        ("b/é", 3, None),
        ("c", 1, None),
        ("c", 9, None),
        ("d", 0, None),
    ]
    last = sorted((row["k"], row["n"] or 0, row["city"]) for row in rows_at(kind, runner.directory / "last"))
    assert last == [("a", 7, "Rome"), ("c", 9, None), ("d", 0, None)]
    runner.batch({"k": "a", "n": "text"})
    # Whichever sink is the first to find out.
    changed = f"failed: table {runner.directory}/(all|last): column 'n' is int32 there and string in the rows"
    with pytest.raises(PipelineError, match=changed):
        await runner.run(file("k string, n string, gone boolean"))
    assert len(rows_at(kind, runner.directory / "all")) == 8


class _Killed(Exception):
    """The process ends here."""


class _Faulty(LakeSink):
    """Dies before or after some commits, as the seed says."""

    def __init__(self, table: Table, seed: int, **options: Any) -> None:
        super().__init__(table, "writer", **options)
        self._chance = random.Random(seed)
        for name in ("append", "merge"):
            setattr(table, name, self._dying(getattr(table, name)))

    def _dying(self, commit: Any) -> Any:
        def die(*arguments: Any) -> None:
            fate = self._chance.choice(("before", "after", "", ""))
            if fate != "before":
                commit(*arguments)
            if fate:
                raise _Killed

        return die


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        pytest.param(Format.DELTA, (), id="append-delta"),
        pytest.param(Format.ICEBERG, (), id="append-iceberg", marks=pytest.mark.soak),
        pytest.param(Format.DELTA, ("k",), id="merge-delta", marks=pytest.mark.soak),
        pytest.param(Format.ICEBERG, ("k",), id="merge-iceberg"),
    ],
)
async def test_a_batch_that_is_killed_around_its_commit_is_there_once(
    kind: Format, key: tuple[str, ...], runner: Runner
) -> None:
    root = Location.parse(str(runner.directory / "table"))

    def write(batch: int, seed: int) -> None:
        rows = runner.spark.range(batch * 10, batch * 10 + 10, 1, 2).selectExpr("id AS k", "id * 2 AS n")
        for attempt in range(20):
            try:
                # A process of its own: it knows what is in the table alone.
                _Faulty(open_table(kind, root), seed * 100 + attempt, key=key)(rows, batch)
                return
            except _Killed:
                continue
        raise AssertionError("no attempt came through")

    for batch in range(4):
        await asyncio.to_thread(write, batch, batch)
    # One that everybody took for dead comes back, and is late.
    await asyncio.to_thread(write, 2, 7)
    found = sorted((row["k"], row["n"]) for row in rows_at(kind, runner.directory / "table"))
    assert found == [(number, number * 2) for number in range(40)]


@pytest.mark.parametrize(
    "kind", [pytest.param(Format.DELTA, id="delta"), pytest.param(Format.ICEBERG, id="iceberg", marks=pytest.mark.soak)]
)
async def test_a_commit_that_another_process_overtakes_is_tried_again_but_not_its_own_batch(
    kind: Format, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Location.parse(str(runner.directory / "table"))

    def overtaken(table: Table, by: LakeSink, batch: int) -> None:
        """The other commits between the last look at the table and the commit."""
        commit = table.append

        def late(*arguments: Any) -> None:
            monkeypatch.setattr(table, "append", commit)
            by(rows, batch)
            commit(*arguments)

        monkeypatch.setattr(table, "append", late)

    rows = runner.spark.range(5)
    first, second = open_table(kind, root), open_table(kind, root)
    LakeSink(first, "a")(rows, 0)
    overtaken(first, LakeSink(second, "b"), 0)
    LakeSink(first, "a")(rows, 1)
    assert len(rows_at(kind, runner.directory / "table")) == 15
    overtaken(first, LakeSink(second, "a"), 2)
    LakeSink(first, "a")(rows, 2)
    assert len(rows_at(kind, runner.directory / "table")) == 20
    second.refresh()
    assert (second.last_batch("a"), second.last_batch("b"), second.last_batch("c")) == (2, 0, None)


class Lake:
    """An archive of the test's queues in a table."""

    def __init__(self, kind: Format, runner: Runner, api: Api, dsn: str) -> None:
        self.kind = kind
        self.runner = runner
        self.root = runner.directory / "lake"
        self.connection = Connection(api.url, databases=(dsn,))

    async def archive(self, *queues: str, rows_per_batch: int = 100_000) -> None:
        declaration = archive_declaration(queues, self.root, ONCE, rows_per_batch, None, self.kind)
        with sole_archiver(self.root) as checkpoints:
            await self.runner.run(declaration, self.connection, checkpoints=checkpoints)

    async def replay(self, **options: Any) -> int:
        given = ReplayOptions(self.root, **options)
        return (await asyncio.to_thread(replay, self.runner.spark, self.connection, given)).queued

    @property
    def table(self) -> Table:
        return open_table(self.kind, Location.parse(str(self.root)))


@pytest.mark.parametrize(
    "kind", [pytest.param(Format.DELTA, id="delta"), pytest.param(Format.ICEBERG, id="iceberg", marks=pytest.mark.soak)]
)
async def test_an_archive_is_a_table_that_keeps_its_versions(kind: Format, runner: Runner, api: Api, dsn: str) -> None:
    lake = Lake(kind, runner, api, dsn)
    await api.push("lake-orders", {"n": 1}, {"n": 2}, partition="a", ids=["one", "two"])
    await api.push("lake/ünusual", [3], None, partition="b")
    await lake.archive("lake-orders", "lake/ünusual", rows_per_batch=2)
    before = datetime.now(UTC)
    version = lake.table.versions()[0].id
    await api.push("lake-orders", {"n": 4}, partition="a")
    await lake.archive("lake-orders", "lake/ünusual")
    stored = {
        (row["queue"], row["partition"], row["offset"], row["payload"].replace(" ", ""))
        for row in rows_at(kind, lake.root)
    }
    assert stored == {
        ("lake-orders", "a", 0, '{"n":1}'),
        ("lake-orders", "a", 1, '{"n":2}'),
        ("lake-orders", "a", 2, '{"n":4}'),
        ("lake/ünusual", "b", 0, "[3]"),
        ("lake/ünusual", "b", 1, "null"),
    }
    reports = await asyncio.to_thread(reconcile, runner.spark, lake.connection, lake.root)
    assert [(one.queue, one.archived, one.whole) for one in reports] == [
        ("lake-orders", 3, True),
        ("lake/ünusual", 2, True),
    ]
    # As it was, by version and by time; and as it is.
    assert await lake.replay(queues=("lake-orders",), to="lake-copy", as_of=version) == 2
    assert await lake.replay(queues=("lake-orders",), to="lake-copy", as_of=before) == 0
    assert await lake.replay(queues=("lake-orders",), to="lake-copy") == 1
    copied = await api.pop("lake-copy", "a", batch=10, autoAck=True)
    assert [message["transactionId"] for message in copied][:2] == ["one", "two"]

    small = len(lake.table.files())
    seen: list[tuple[int, int]] = []
    done = lake.table.compact(2**27, 2, lambda done, total: seen.append((done, total)))
    assert (done.files_before - done.files_after, seen[-1]) == (small - len(lake.table.files()), (len(seen) - 1,) * 2)
    assert len(rows_at(kind, lake.root)) == 5
    assert sum(file.rows for file in lake.table.files(version)) == 4
    # Without the old versions: their files go, and what is there now stays.
    left = lake.root / ("orphan.parquet" if kind is Format.DELTA else "data/orphan.parquet")
    left.write_bytes(b"of a run that was killed")
    unused = lake.table.vacuum(0, dry_run=True)
    assert len(unused) > done.files_before and any("orphan" in path for path in unused) and left.exists()
    lake.table.vacuum(0, dry_run=False)
    assert not left.exists() and lake.table.vacuum(0, dry_run=True) == []
    assert len(rows_at(kind, lake.root)) == 5
    await api.push("lake-orders", {"n": 5}, partition="a")
    await lake.archive("lake-orders", "lake/ünusual")
    assert len(rows_at(kind, lake.root)) == 6
    with pytest.raises(ArchiveError, match=r"has (versions 0 to|no version 99)"):
        await lake.replay(as_of=99)
    with pytest.raises(ArchiveError, match="has no version of 2001"):
        await lake.replay(as_of=datetime(2001, 1, 1, tzinfo=UTC))
    other = Format.ICEBERG if kind is Format.DELTA else Format.DELTA
    with pytest.raises(ArchiveError, match=f"is an archive in the format {kind.value}: --format {kind.value}, or"):
        archive_declaration(["lake-orders"], lake.root, ONCE, 1, None, other)


@pytest.mark.soak
@pytest.mark.parametrize("kind", [Format.DELTA, Format.ICEBERG], ids=["delta", "iceberg"])
async def test_the_commands_of_a_table_from_its_first_version_to_its_vacuum(
    kind: Format, runner: Runner, api: Api, dsn: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root, data = str(tmp_path / "lake"), ("--data-dir", str(tmp_path / "data"))

    async def queen(*arguments: str, fails: bool = False) -> str:
        def command() -> tuple[int, str, str]:
            runner.session()
            return in_process(capsys, "pipeline", *arguments, *data)

        code, out, err = await asyncio.to_thread(command)
        assert code == int(fails), err
        return err if fails else out

    archive = ("archive", "orders", "--to", root, "--format", kind.value, "--once", "--no-compact")
    at = ("--server", api.url)
    for number in range(3):
        await api.push("orders", {"n": number}, partition="a")
        said = await queen(*archive, *at, "--database-url", dsn)
        assert "is done: 1 rows read, 1 written, 0 dead letters" in said
    listed = json.loads(await queen("versions", root, "--json"))
    batches = [one["batch"] for one in listed if one["batch"] is not None]
    assert batches == [2, 1, 0]
    second = str(next(one["id"] for one in listed if one["batch"] == 1))
    assert second in await queen("versions", root)

    replay = ("replay", root, "--to", "copy", *at)
    assert "2 messages in 2 files would be replayed" in await queen(*replay, "--as-of", second, "--dry-run")
    assert "2 messages were pushed to copy; 0 were there already" in await queen(*replay, "--as-of", second)
    assert "1 messages were pushed to copy; 2 were there already" in await queen(*replay)
    copied = await api.pop("copy", "a", batch=10, autoAck=True)
    assert [message["data"] for message in copied] == [{"n": 0}, {"n": 1}, {"n": 2}]

    assert "3 files became 1" in await queen("compact", root)
    assert "0 files would be removed" in await queen("vacuum", root, "--dry-run")
    old = await queen("vacuum", root, "--keep-hours", "0", "--dry-run")
    assert old.count(".parquet") >= 3
    assert f"{len(old.splitlines()) - 1} files were removed" in await queen("vacuum", root, "--keep-hours", "0")
    assert len(rows_at(kind, Path(root))) == 3
    assert "in the archive, and the same there" in await queen("reconcile", root, *at, "--database-url", dsn)
    other = "iceberg" if kind is Format.DELTA else "delta"
    wrong = ("archive", "orders", "--to", root, "--format", other, "--once", *at, "--database-url", dsn)
    assert f"is an archive in the format {kind.value}: --format {kind.value}" in await queen(*wrong, fails=True)


def test_columns_may_be_added_and_widened_where_the_format_can() -> None:
    old = pyarrow.schema([("n", pyarrow.int32()), ("s", pyarrow.struct([("a", pyarrow.int32())]))])
    wider = pyarrow.schema([("n", pyarrow.int64()), ("x", pyarrow.string())])
    found = evolve("t", old, wider, promotes=True)
    assert [str(field.type) for field in found.schema] == ["int64", "struct<a: int32>", "string"]
    assert ([one.name for one in found.promoted], [one.name for one in found.added]) == (["n"], ["x"])
    assert not evolve("t", found.schema, old, promotes=False).changes
    with pytest.raises(SchemaChange, match="table t: column 'n' is int32 there and int64 in the rows: delta-rs cannot"):
        evolve("t", old, wider, promotes=False)
    for rows, text in (
        ([("n", pyarrow.string())], "column 'n' is int32 there and string in the rows; cast it"),
        ([("s", pyarrow.struct([("a", pyarrow.string())]))], r"column 's\.a' is int32 there and string"),
        ([("s", pyarrow.string())], r"column 's' is struct<a: int32> there and string"),
    ):
        with pytest.raises(SchemaChange, match=text):
            evolve("t", old, pyarrow.schema(rows), promotes=True)
    needed = pyarrow.schema([pyarrow.field("id", pyarrow.int64(), nullable=False)])
    with pytest.raises(SchemaChange, match="column 'id' may not be null"):
        evolve("t", needed, old, promotes=True)


@pytest.mark.parametrize("left_out", [(), ("nested",), ("nested", "nan", "infinite", "exact")])
def test_other_readers_of_delta_find_every_value_by_a_filter(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    rows = pyarrow.table(
        {
            "id": pyarrow.array([1, 2, 3], pyarrow.int64()),
            "flag": [True, None, False],
            "binary": [b"x", None, b"z"],
            "float": [1.5, None, 2.5],
            "nan": [1.5, float("nan"), 2.5],
            "infinite": [1.5, float("inf"), None],
            "price": pyarrow.array([Decimal("1.50"), None, None], pyarrow.decimal128(10, 2)),
            "exact": pyarrow.array([Decimal("12345678901234567890.5"), None, None], pyarrow.decimal128(38, 10)),
            "long": ["y" * 500, None, "z" * 64 + "\U0010ffff" * 2],
            "huge": ["y" * 10_000, None, ""],
            "nothing": pyarrow.array([None] * 3, pyarrow.string()),
            "nested": pyarrow.array([{"m": 1}, None, {"m": 3}], pyarrow.struct([("m", pyarrow.int32())])),
            "list": pyarrow.array([[1], None, []], pyarrow.list_(pyarrow.int32())),
            "at": [datetime(1, 1, 1, tzinfo=UTC), None, datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)],
            "local": [datetime(2026, 1, 1, 1, 2, 3, 4), None, None],
            "day": [date(1, 1, 1), None, date(2026, 1, 1)],
        }
    ).drop_columns(list(left_out))
    table = DeltaLake(Location.parse(str(tmp_path / "t")))
    table.create(rows.schema, ())
    evolution = table.evolved(rows.schema)
    table.append(write_table(rows, table.plan(evolution)), evolution, "w", 0)
    dataset = deltalake.DeltaTable(tmp_path / "t").to_pyarrow_dataset()
    from pyarrow.dataset import field

    for name in rows.column_names:
        for null in (field(name).is_null(), field(name).is_valid()):
            assert dataset.to_table(filter=null).num_rows == rows.filter(null).num_rows, name
        kind = rows.schema.field(name).type
        if not pyarrow.types.is_nested(kind):
            for value in rows.column(name).to_pylist():
                equal = field(name) == pyarrow.scalar(value, kind)
                assert dataset.to_table(filter=equal).num_rows == rows.filter(equal).num_rows, (name, value)
    if "nan" not in left_out:
        nan = pyarrow.compute.is_nan(field("nan"))
        assert dataset.to_table(filter=nan).num_rows == 1
    if len(left_out) > 1:
        assert dataset.to_table(filter=field("id") > 3).num_rows == 0
        (fragment,) = dataset.get_fragments()
        assert "id <= 3" in str(fragment.partition_expression)


@pytest.fixture
def far_from_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The time zone of this machine is another."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_from_utc")
@pytest.mark.parametrize("kind", FORMATS)
def test_partitions_by_time_hold_the_time_of_their_rows(kind: Format, tmp_path: Path) -> None:
    at = datetime(2026, 1, 1, 1, 2, 3, 4)
    for name, value in (("local", at), ("at", at.replace(tzinfo=UTC))):
        rows = pyarrow.table({"n": [1, 2], "t": [value, None]})
        table = open_table(kind, Location.parse(str(tmp_path / name)))
        table.create(rows.schema, ("t",))
        evolution = table.evolved(rows.schema)
        table.append(write_table(rows, table.plan(evolution)), evolution, "w", 0)
        assert {row["n"]: row["t"] for row in rows_at(kind, tmp_path / name)} == {1: value, 2: None}


@pytest.mark.parametrize("kind", FORMATS)
def test_null_and_empty_stay_what_they_are_when_files_are_written_again(kind: Format, tmp_path: Path) -> None:
    structs = pyarrow.struct([("z", pyarrow.int32())])
    before = pyarrow.schema([("id", pyarrow.int32() if kind is Format.ICEBERG else pyarrow.int64())])
    nested = [("list", pyarrow.list_(pyarrow.int32())), ("structs", pyarrow.list_(structs))]
    nested += [("map", pyarrow.map_(pyarrow.string(), structs)), ("inner", pyarrow.struct([("s", nested[1][1])]))]
    after = pyarrow.schema([("id", pyarrow.int64()), *nested])
    old = [{"id": 1}, {"id": 2}]
    new: list[dict[str, Any]] = [
        {"id": 3, "list": [1, None], "structs": [{"z": 1}, None], "map": [("a", None)], "inner": {"s": [{"z": None}]}},
        {"id": 4, "list": None, "structs": None, "map": None, "inner": None},
        {"id": 5, "list": [], "structs": [], "map": [], "inner": {"s": None}},
        {"id": 6, "list": [], "structs": [], "map": [], "inner": {"s": []}},
    ]
    table = open_table(kind, Location.parse(str(tmp_path / "t")))
    table.create(before, ())
    for batch, (rows, schema) in enumerate(((old, before), (new, after))):
        evolution = table.evolved(schema)
        table.change(evolution)
        table.append(
            write_table(pyarrow.Table.from_pylist(rows, schema), table.plan(evolution)), evolution, "writer", batch
        )

    def stored() -> list[dict[str, Any]]:
        tables = [pyarrow.parquet.read_table(file.url).cast(after) for file in table.files()]
        return sorted(pyarrow.concat_tables(tables).to_pylist(), key=lambda row: int(row["id"]))

    empty = dict.fromkeys(after.names)
    assert table.compact(2**27, 2).files_after == 1
    assert stored() == [*(empty | row for row in old), *new]
    keyed = pyarrow.Table.from_pylist([{"id": 2, "list": [9]}], after).append_column(DELETED, pyarrow.array([False]))
    table.merge(keyed, ["id"], table.evolved(after), "writer", 2)
    assert stored() == [empty | old[0], empty | {"id": 2, "list": [9]}, *new]


def test_of_rows_with_one_key_the_last_is_kept_and_those_without_one_all() -> None:
    table = pyarrow.table({"k": ["a", None, "a", None, "b"], "n": [1, 2, 3, 4, 5]})
    assert newest(table, ["k"]).to_pydict() == {"k": [None, "a", None, "b"], "n": [2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ftp://host/table", "expected a directory, or a URL that begins with s3://"),
        ("memory://table", "expected a directory, or a URL that begins with s3://"),
        ("s3://", "and names a bucket"),
    ],
)
def test_a_url_that_no_table_can_be_at_is_refused(text: str, problem: str) -> None:
    with pytest.raises(PipelineError, match=problem):
        Location.parse(text)


def test_what_is_declared_wrong_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(
        "pipeline: wrong\nsources:\n  s: {rate: 1}\nsinks:\n  one: {from: s, delta: /t, delete_when: gone}\n"
        "  two: {from: s, delta: /t, catalog: x}\n  three: {from: s, icebrg: /t}\n"
    )
    with pytest.raises(DeclarationError) as error:
        load(file)
    assert [problem.where.line for problem in error.value.problems] == [5, 6, 7]
    assert "'delete_when' needs 'key'" in str(error.value)
    assert "unknown 'catalog'" in str(error.value)
    assert "did you mean 'iceberg'?" in str(error.value)


@pytest.mark.parametrize("kind", FORMATS)
def test_packages_that_are_missing_are_named(kind: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {Format.DELTA: "deltalake", Format.ICEBERG: "pyiceberg"}[kind]
    hidden: Sequence[str] = [name for name in sys.modules if name.partition(".")[0] == package]
    for name in (*hidden, package):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"queen.pipelines.tables.{kind.value}", raising=False)
    with pytest.raises(TablesMissing, match=rf"needs {package}.*: pip install '\.\[tables\]' in a clone"):
        open_table(kind, Location.parse(str(tmp_path / "t")))


def test_a_catalog_has_one_table_of_a_name(tmp_path: Path) -> None:
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    schema = pyarrow.schema([("n", pyarrow.int64())])
    open_table(Format.ICEBERG, Location.parse(str(tmp_path / "one/t")), catalog).create(schema, ())
    with pytest.raises(ArchiveError, match=r"table queen\.t of the catalog is at .*one/t, not at .*two/t"):
        open_table(Format.ICEBERG, Location.parse(str(tmp_path / "two/t")), catalog)
    assert format_at(Location.parse(str(tmp_path / "one/t"))) is Format.ICEBERG
    with pytest.raises(PipelineError, match="a table in an object store needs a catalog"):
        open_table(Format.ICEBERG, Location.parse("s3://bucket/t"))
    with pytest.raises(PipelineError, match="the URL of a catalog begins with postgresql:// or sqlite:///"):
        open_table(Format.ICEBERG, Location.parse(str(tmp_path / "one/t")), "mysql://h/d")


def test_a_table_that_is_damaged_is_named(tmp_path: Path) -> None:
    log = tmp_path / "t" / "_delta_log"
    log.mkdir(parents=True)
    (log / "00000000000000000000.json").write_text("{nonsense")
    with pytest.raises(ArchiveError, match=r"^table \S+/t cannot be used: [^\n]+$"):
        open_table(Format.DELTA, Location.parse(str(tmp_path / "t")))


def test_a_damaged_file_of_a_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(b"no Parquet")
    listed = pyarrow.record_batch({"path": [str(file)], "given": ["{}"]})
    with pytest.raises(ArchiveError, match=rf"^{file} cannot be read: Parquet magic bytes not found"):
        list(_read(pyarrow.schema([]), iter([listed])))


def test_an_object_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(url: str) -> Any:
        raise RuntimeError(f"Could not connect to the endpoint\nof {url}")

    monkeypatch.setattr("fsspec.core.url_to_fs", unreachable)
    with pytest.raises(PipelineError, match=r"^s3://b/t/_delta_log cannot be reached: Could not connect to the endpo"):
        format_at(Location.parse("s3://b/t"))


def test_a_table_in_a_store_that_cannot_be_reached_is_named_on_one_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalake.DeltaTable", _raise_store_error)
    with pytest.raises(
        ArchiveError, match=r"^table s3://b/t cannot be used: no credentials: IMDS is off\. Check its [^\n]+$"
    ):
        open_table(Format.DELTA, Location.parse("s3://b/t"))


def _raise_store_error(url: str) -> Any:
    raise OSError("no credentials\n\x1b[31m↳\x1b[0m IMDS is off")
