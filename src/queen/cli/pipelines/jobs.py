"""The built-in jobs of `queen pipeline`, a command each."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

import rich.console
import rich.progress
import rich.table
import typer

from queen.cli.common.tree import command
from queen.cli.pipelines.run import (
    LOCAL,
    Conf,
    DatabaseUrl,
    DataDir,
    FailOnDataLoss,
    Json,
    Master,
    Server,
    Token,
    connect,
    data_dir,
    print_json,
    run_shown,
    session,
)
from queen.errors import QueenError
from queen.pipelines.errors import AlreadyRunning, spark_failures
from queen.pipelines.lineage.jobs import job_run, path_dataset, queue_dataset
from queen.pipelines.run import RunOptions
from queen.pipelines.session import require_spark
from queen.pipelines.state import StateDirectory
from queen.pipelines.tables.locations import TARGET_BYTES, Location
from queen.pipelines.tables.opening import Format, format_at, open_table
from queen.pipelines.tables.table import Table
from queen.wire.push import check_name
from queen.wire.times import EXPECTED_DURATION, duration_ms, parse_time

jobs = typer.Typer()

ArchivePath = Annotated[str, typer.Argument(help="The archive: a directory, or a URL such as s3://bucket/archive.")]
Catalog = Annotated[
    str | None,
    typer.Option(
        help="Database with the catalog of an Iceberg table. [catalog.db in its directory; in an object store, the"
        " PostgreSQL of the server]"
    ),
]
_HOUSEKEEPING_FILES: Final = 20


def _progress() -> rich.progress.Progress:
    """A bar on stderr, if that is a terminal."""
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    console = rich.console.Console(stderr=True)
    return rich.progress.Progress(*columns, console=console, disable=not console.is_terminal)


@command(
    jobs,
    "archive",
    example="""
queen pipeline archive orders payments --to /data/archive
queen pipeline archive orders --to s3://lake/orders --format delta --once
""",
)
def archive(
    queues: Annotated[list[str], typer.Argument(help="The queues.")],
    to: Annotated[str, typer.Option(help="Directory of the archive, or its URL (s3://...); made if need be.")],
    kind: Annotated[Format, typer.Option("--format", help="Files by hour, or a table.")] = Format.PARQUET,
    catalog: Catalog = None,
    once: Annotated[bool, typer.Option(help="Archive what is available now, and end.")] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            help="Drop the checkpoints, and archive all that the queues hold: messages that are archived already are"
            " archived twice."
        ),
    ] = False,
    fail_on_data_loss: FailOnDataLoss = None,
    every: Annotated[str, typer.Option(help="Interval of batches.")] = "30 seconds",
    rows_per_batch: Annotated[int, typer.Option(min=1, help="Maximum number of messages per batch.")] = 500_000,
    group: Annotated[str | None, typer.Option(help="A consumer group that shows how far the archive is.")] = None,
    compact: Annotated[bool, typer.Option(help="Compact small files of past hours.")] = True,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Copy queues to Parquet files by queue, date and hour: every message, every column, once.

    With --format delta or iceberg they are a table, by queue and date, which
    keeps its versions. It goes on where it ended, also after kill -9. Nothing is consumed. Any
    reader of Parquet may read the directory while it is written.
    """
    require_spark()
    from queen.pipelines.declaration import ONCE
    from queen.pipelines.jobs.archive import archive_declaration, check_table, sole_archiver
    from queen.pipelines.jobs.compact import compact as join_files

    if duration_ms(every) is None:
        raise QueenError(f"--every {every}: expected {EXPECTED_DURATION}")
    directory = data_dir(data_directory)
    location = Location.parse(to)
    connection = connect(server, token, database_url, directory)
    catalog = _catalog(location, kind, catalog, connection.databases)
    states = StateDirectory(directory)
    trigger = ONCE if once else every
    declaration = archive_declaration(queues, to, trigger, rows_per_batch, group, kind, catalog, states)

    def housekeeping() -> None:
        if kind is Format.PARQUET:
            join_files(to)
        else:
            open_table(kind, location, catalog).compact(TARGET_BYTES, _HOUSEKEEPING_FILES)

    with spark_failures(), sole_archiver(to, states.checkpoints(declaration.name)) as checkpoints:
        if not fresh:
            check_table(to, checkpoints)
        options = RunOptions(
            location.url,
            master,
            fresh=fresh,
            fail_on_data_loss=fail_on_data_loss,
            checkpoints=checkpoints,
            housekeeping=housekeeping if compact else None,
        )
        run_shown(declaration, connection, states, options, conf)


@command(jobs, "compact", example="queen pipeline compact /data/archive --target-mb 256")
def compact(
    root: ArchivePath,
    target_mb: Annotated[int, typer.Option(min=1, help="Size of the files to make.")] = 128,
    all_hours: Annotated[bool, typer.Option("--all", help="Files by hour: the running hour, too.")] = False,
    catalog: Catalog = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Join small files of an archive or a table. Readers of its manifest or table see the old files or the new."""
    from queen.pipelines.jobs.compact import compact as join_files

    location = Location.parse(root)
    with _progress() as progress, spark_failures():
        task = progress.add_task("compact", total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        if format_at(location) in (Format.DELTA, Format.ICEBERG):
            table = _open_table(root, catalog, database_url, data_directory)
            joined = table.compact(target_mb * 2**20, 2, show)
        else:
            joined = join_files(root, target_mb * 2**20, running_hour=all_hours, on_progress=show)
    print(f"{joined.files_before} files became {joined.files_after}")


@command(jobs, "vacuum", example="queen pipeline vacuum s3://bucket/orders --keep-hours 24 --dry-run")
def vacuum(
    root: ArchivePath,
    keep_hours: Annotated[int, typer.Option(min=0, help="Versions of so many hours stay readable.")] = 168,
    dry_run: Annotated[bool, typer.Option(help="Only list the files.")] = False,
    catalog: Catalog = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Remove files of a table that only older versions have, and what runs that were killed have left.

    Files that are being written belong to no version yet: with a few hours to
    keep, stop what writes to the table first.
    """
    with spark_failures():
        files = _open_table(root, catalog, database_url, data_directory).vacuum(keep_hours, dry_run=dry_run)
    if dry_run:
        for file in files:
            print(file)
    print(f"{len(files)} files {'would be' if dry_run else 'were'} removed")


@command(jobs, "versions", example="queen pipeline versions s3://bucket/orders")
def versions(
    root: ArchivePath,
    json: Json = False,
    catalog: Catalog = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """The versions of a table, the newest first: --as-of reads them."""
    found = _open_table(root, catalog, database_url, data_directory).versions()
    if json:
        print_json(found)
        return
    table = rich.table.Table(box=None)
    for heading in ("VERSION", "TIME (UTC)", "OPERATION", "BATCH", "WRITER"):
        table.add_column(heading, no_wrap=heading != "WRITER", overflow="fold")
    for one in found:
        batch = "" if one.batch is None else str(one.batch)
        table.add_row(str(one.id), f"{one.at:%Y-%m-%d %H:%M:%S.%f}"[:-3], one.operation, batch, one.writer or "")
    rich.console.Console(markup=False).print(table)


def _open_table(root: str, catalog: str | None, database_url: str | None, directory: Path | None) -> Table:
    location = Location.parse(root)
    kind = format_at(location)
    if kind not in (Format.DELTA, Format.ICEBERG):
        raise QueenError(f"{root} is not a Delta or Iceberg table")
    return open_table(kind, location, _catalog_of(root, catalog, directory, database_url))


def _catalog(location: Location, kind: Format | None, given: str | None, databases: tuple[str, ...]) -> str | None:
    if given is not None and kind is not Format.ICEBERG:
        raise QueenError("--catalog is for tables in the format iceberg")
    return given or (next(iter(databases), None) if kind is Format.ICEBERG and location.path is None else None)


@command(
    jobs,
    "replay",
    example="""
queen pipeline replay /data/archive --queue orders --from 2026-11-15T08:00 --until 2026-11-15T09:00 --dry-run
queen pipeline replay /data/archive --queue orders --to orders-test --speed 10 --filter "payload LIKE '%EUR%'"
""",
)
def replay(
    root: ArchivePath,
    queue: Annotated[list[str] | None, typer.Option(help="Only messages of this queue; may be repeated.")] = None,
    to: Annotated[str | None, typer.Option(help="The queue to push to. [the one they came from]")] = None,
    since: Annotated[str | None, typer.Option("--from", help="Messages pushed at this time or later.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Messages pushed before this time.")] = None,
    condition: Annotated[str | None, typer.Option("--filter", help="SQL over the columns of messages.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="1: at the original pace, 10: ten times as fast. [as fast as possible]")
    ] = None,
    new_ids: Annotated[bool, typer.Option(help="New transaction ids, so that nothing is a duplicate.")] = False,
    own_name: Annotated[
        bool, typer.Option(help="Push them as yourself; by default they keep their original producer.")
    ] = False,
    as_of: Annotated[
        str | None, typer.Option(help="A table as it was: a version of `queen pipeline versions`, or a time.")
    ] = None,
    catalog: Catalog = None,
    dry_run: Annotated[bool, typer.Option(help="Only count the messages.")] = False,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    data_directory: DataDir = None,
) -> None:
    """Push messages of an archive again, each to its partition and in order.

    They keep their transaction ids: what the queue still remembers is not
    stored twice, and a replay that was interrupted can be run again. They keep
    the producers that were noted on them, for which a token needs the role
    admin; with --own-name the subject of the token is noted.
    """
    require_spark()
    if speed is not None and not speed > 0:
        raise QueenError(f"--speed {speed:g}: expected a number above 0")
    if to is not None:
        check_name(to, "the name of a queue", "--to")
    begin, end = _stretch(since, until)
    from queen.pipelines.archive_files import check_queues, reading
    from queen.pipelines.jobs.replay import Replayed, ReplayOptions, ReplayReport, select
    from queen.pipelines.jobs.replay import replay as push_again

    options = ReplayOptions(
        root,
        tuple(queue or ()),
        to,
        begin,
        end,
        condition,
        speed,
        new_ids,
        keep_producers=not own_name,
        as_of=int(as_of) if as_of is not None and as_of.isdigit() else _time(as_of, "--as-of"),
        catalog=_catalog_of(root, catalog, data_directory),
    )
    with reading(options.root, options.as_of, options.catalog) as view, spark_failures():
        check_queues(view, options.queues)
        spark = session("replay", master, conf)
        total = select(spark, options, view).count()
        files = view.count_files(options.selection)
        held = view.queues()
    if dry_run:
        print(f"{total} messages in {files} files would be replayed")
        return
    connection = connect(server, token, None, data_directory)
    with ExitStack() as stack:
        directory = _report_directory(stack, StateDirectory(data_dir(data_directory)), root)
        progress = stack.enter_context(_progress())
        task = progress.add_task("replay", total=total)
        report = ReplayReport(directory, options, master, total)
        done = Replayed()

        def show(so_far: Replayed) -> None:
            nonlocal done
            done = so_far
            progress.update(task, completed=so_far.queued + so_far.duplicates)
            report.note(so_far)

        targets = [to] if to is not None else list(options.queues) or held
        outputs = [queue_dataset(connection.server, name) for name in targets]
        try:
            with job_run(directory.name, [path_dataset(str(root))], outputs) as lineage, spark_failures():
                done = push_again(spark, connection, options, show)
                if lineage is not None:
                    lineage.read, lineage.written = done.queued + done.duplicates, done.queued
        except QueenError as error:
            report.end(done, str(error))
            raise
        report.end(done)
    where = ", ".join(sorted(done.queues)) or "nowhere"
    print(f"{done.queued} messages were pushed to {where}; {done.duplicates} were there already")


def _catalog_of(root: str, catalog: str | None, directory: Path | None, database_url: str | None = None) -> str | None:
    """The catalog of an archive that is to be read."""
    location = Location.parse(root)
    kind = format_at(location)
    databases: tuple[str, ...] = ()
    if kind is Format.ICEBERG and location.path is None:
        databases = connect(None, None, database_url, directory).databases
    return _catalog(location, kind, catalog, databases)


def _report_directory(stack: ExitStack, state: StateDirectory, root: str) -> Path:
    """Where a replay reports, for as long as it runs. Several of an archive may run at the same time."""
    name = f"replay-{Location.parse(root).name or 'archive'}"
    try:
        return stack.enter_context(state.running(name))
    except AlreadyRunning:
        return stack.enter_context(state.running(f"{name}-{os.getpid()}"))


@command(jobs, "reconcile", example="queen pipeline reconcile /data/archive --queue orders")
def reconcile(
    root: ArchivePath,
    queue: Annotated[list[str] | None, typer.Option(help="Only this queue; may be repeated. [all archived]")] = None,
    allow_behind: Annotated[
        bool, typer.Option(help="Messages that came after the last archived one are not an error.")
    ] = False,
    catalog: Catalog = None,
    json: Json = False,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Prove that what was pushed is in the archive: counts and checksums of every partition. Exits with 1 if not."""
    require_spark()
    from queen.pipelines.archive_files import reading
    from queen.pipelines.jobs.reconcile import reconcile as compare

    connection = connect(server, token, database_url, data_directory)
    names = tuple(queue or ())
    with spark_failures():
        where = _catalog_of(root, catalog, data_directory, database_url)
        # What is no archive is said before Spark starts.
        with reading(root, catalog=where) as view:
            view.queues()
        reports = compare(session("reconcile", master, conf), connection, root, names, where)
    if json:
        print_json(reports)
    else:
        table = rich.table.Table(box=None)
        for heading in ("QUEUE", "PARTITION"):
            table.add_column(heading, overflow="fold")
        # Numbers are never cut: in a narrow terminal the names are folded.
        for heading in ("PUSHED", "ARCHIVED", "MISSING", "BEHIND", "DIFFER", "DOUBLED", "GONE"):
            table.add_column(heading, justify="right", no_wrap=True)
        for one in reports:
            numbers = (one.pushed, one.archived, one.missing, one.behind, one.different, one.doubled, one.only_archived)
            table.add_row(one.queue, one.partition, *map(str, numbers))
        rich.console.Console(markup=False).print(table)
    bad = sum(not one.whole for one in reports)
    behind = sum(one.behind for one in reports)
    pushed = sum(one.pushed for one in reports)
    if bad:
        raise QueenError(f"{bad} of {len(reports)} partitions are archived incorrectly")
    if behind and not allow_behind:
        raise QueenError(f"{behind} messages are not archived yet: archive them, or pass --allow-behind")
    if not json:
        print(f"all {pushed - behind} messages of {len(reports)} partitions are in the archive, and the same there")


@command(jobs, "dlq-report", example="queen pipeline dlq-report --queue orders --samples 5")
def dlq_report(
    queue: Annotated[str | None, typer.Option(help="Only dead letters of this queue.")] = None,
    since: Annotated[str | None, typer.Option("--from", help="Failed at this time or later.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Failed before this time.")] = None,
    samples: Annotated[int, typer.Option(min=0, max=100, help="Samples of each kind of failure.")] = 3,
    json: Json = False,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Dead letters clustered by what went wrong, with samples."""
    require_spark()
    from queen.pipelines.jobs.dlq_report import dlq_report as cluster

    begin, end = _stretch(since, until)
    connection = connect(server, token, database_url, data_directory)
    with spark_failures():
        clusters = cluster(
            session("dlq-report", master, conf), connection, queue=queue, since=begin, until=end, samples=samples
        )
    if json:
        print_json(clusters)
        return
    console = rich.console.Console(markup=False)
    if not clusters:
        console.print("there are no dead letters")
    for one in clusters:
        console.print(f"{one.count} x {one.error}", style="bold", markup=False, highlight=False)
        queues, groups = ", ".join(one.queues), ", ".join(one.groups)
        console.print(f"    {queues}; groups {groups}; {one.first_at} to {one.last_at}", markup=False, highlight=False)
        for sample in one.samples:
            place = f"{sample.queue}/{sample.partition} {sample.transaction_id}"
            console.print(f"    {place}: {sample.error}: {sample.payload}", markup=False, highlight=False)


@command(jobs, "rollup", example="queen pipeline rollup --every '5 minutes'")
def rollup(
    since: Annotated[str | None, typer.Option("--from", help="Start time. [the end of the last run]")] = None,
    until: Annotated[str | None, typer.Option("--until", help="End time, exclusive. [the current minute]")] = None,
    every: Annotated[str | None, typer.Option(help="Keep running, and roll up at this interval.")] = None,
    keep_days: Annotated[int, typer.Option(min=1, help="Retention of rolled-up minutes.")] = 90,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Throughput, latency, lag and errors by minute, queue and group, into a table that the dashboard reads.

    It can be run as often as one likes: a minute is replaced as a whole.
    """
    require_spark()
    pause = duration_ms(every) if every is not None else None
    if every is not None and not pause:
        raise QueenError(f"--every {every}: expected {EXPECTED_DURATION}")
    from queen.pipelines.jobs.rollup import rollup as roll_up

    begin, end = _stretch(since, until)
    connection = connect(server, token, database_url, data_directory)
    spark = session("rollup", master, conf)
    while True:
        with spark_failures():
            done = roll_up(spark, connection, since=begin, until=end, keep=timedelta(days=keep_days))
        span = f"{done.since:%Y-%m-%d %H:%M} to {done.until:%Y-%m-%d %H:%M} UTC"
        print(f"{span}: {done.messages} messages of {done.queues} queues in {done.rows} rows", flush=True)
        if pause is None:
            return
        begin = None
        time.sleep(pause / 1000)


def _stretch(since: str | None, until: str | None) -> tuple[datetime | None, datetime | None]:
    """Raises `QueenError` for one that ends before it begins, in which there can be nothing."""
    begin, end = _time(since, "--from"), _time(until, "--until")
    if begin is not None and end is not None and begin > end:
        raise QueenError(f"--from {since} is after --until {until}")
    return begin, end


def _time(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    moment = parse_time(text)
    if moment is None:
        version = "a version of `queen pipeline versions`, or " if option == "--as-of" else ""
        raise QueenError(f"{option} {text}: expected {version}a time such as 2026-11-15T08:00:00Z")
    return moment.astimezone(UTC)
