"""The built-in jobs of `queen pipeline`, a command each."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import rich.table
import typer

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
from queen.pipelines import durations
from queen.pipelines.errors import AlreadyRunning, spark_failures
from queen.pipelines.lineage.jobs import job_run, path_dataset, queue_dataset
from queen.pipelines.run import RunOptions
from queen.pipelines.session import require_spark
from queen.pipelines.state import StateDirectory
from queen.wire.times import parse_time

jobs = typer.Typer()

ArchivePath = Annotated[Path, typer.Argument(help="The archive.")]


@jobs.command()
def archive(
    queues: Annotated[list[str], typer.Argument(help="The queues.")],
    to: Annotated[Path, typer.Option(help="Directory of the archive; made if need be.")],
    once: Annotated[bool, typer.Option(help="Archive what is available now, and end.")] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            help="Drop the checkpoints, and archive all that the queues hold: messages that are archived already are"
            " archived twice."
        ),
    ] = False,
    fail_on_data_loss: FailOnDataLoss = None,
    every: Annotated[str, typer.Option(help="How often a batch begins.")] = "30 seconds",
    rows_per_batch: Annotated[int, typer.Option(min=1, help="Messages of a batch at most.")] = 500_000,
    group: Annotated[str | None, typer.Option(help="A consumer group that shows how far the archive is.")] = None,
    compact: Annotated[bool, typer.Option(help="Join small files of hours that are over.")] = True,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    database_url: DatabaseUrl = None,
    data_directory: DataDir = None,
) -> None:
    """Copy queues to Parquet files by queue, date and hour: every message, every column, once.

      queen pipeline archive orders payments --to /data/archive

    It goes on where it ended, also after kill -9. Nothing is consumed. Any
    reader of Parquet may read the directory while it is written.
    """
    require_spark()
    from queen.pipelines.declaration import ONCE
    from queen.pipelines.jobs.archive import archive_declaration, sole_archiver
    from queen.pipelines.jobs.compact import compact as join_files

    if durations.milliseconds(every) is None:
        raise QueenError(f"--every {every}: expected {durations.EXPECTED}")
    directory = data_dir(data_directory)
    declaration = archive_declaration(queues, to, ONCE if once else every, rows_per_batch, group)
    with sole_archiver(to) as checkpoints:
        options = RunOptions(
            to.absolute(),
            master,
            fresh=fresh,
            fail_on_data_loss=fail_on_data_loss,
            checkpoints=checkpoints,
            housekeeping=(lambda: join_files(to)) if compact else None,
        )
        connection = connect(server, token, database_url, directory)
        run_shown(declaration, connection, StateDirectory(directory), options, conf)


@jobs.command()
def compact(
    root: ArchivePath,
    target_mb: Annotated[int, typer.Option(min=1, help="Size of the files to make.")] = 128,
    all_hours: Annotated[bool, typer.Option("--all", help="The running hour, too.")] = False,
) -> None:
    """Join small files of an archive. Readers of its manifest see the old files or the new."""
    from queen.pipelines.jobs.compact import compact as join_files

    with spark_failures():
        done = join_files(root, target_mb * 2**20, running_hour=all_hours)
    print(f"{done.files_before} files became {done.files_after}; {done.rows} messages in them")


@jobs.command()
def replay(
    root: ArchivePath,
    queue: Annotated[list[str] | None, typer.Option(help="Only messages of this queue; may be repeated.")] = None,
    to: Annotated[str | None, typer.Option(help="The queue to push to. [the one they came from]")] = None,
    since: Annotated[str | None, typer.Option("--from", help="Messages pushed at this time or later.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Messages pushed before this time.")] = None,
    condition: Annotated[str | None, typer.Option("--filter", help="SQL over the columns of messages.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="1: as they once came, 10: ten times as fast. [as fast as can be]")
    ] = None,
    new_ids: Annotated[bool, typer.Option(help="New transaction ids, so that nothing is a duplicate.")] = False,
    own_name: Annotated[bool, typer.Option(help="They count as yours; else, as of whoever pushed them first.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Only count the messages.")] = False,
    master: Master = LOCAL,
    conf: Conf = None,
    server: Server = None,
    token: Token = None,
    data_directory: DataDir = None,
) -> None:
    """Push messages of an archive again, each to its partition and in order.

      queen pipeline replay /data/archive --queue orders --to orders-test
        --from 2026-11-15T08:00 --until 2026-11-15T09:00
        --filter "get_json_object(payload, '$.country') = 'IT'" --speed 10

    They keep their transaction ids: what the queue still remembers is not
    stored twice, and a replay that was interrupted can be run again. They keep
    the producers that were noted on them, for which a token needs the role
    admin; with --own-name the subject of the token is noted.
    """
    require_spark()
    if speed is not None and not speed > 0:
        raise QueenError(f"--speed {speed:g}: expected a number above 0")
    from queen.pipelines.archive_files import check_queues, files_of, open_archive, place_of
    from queen.pipelines.jobs.replay import Replayed, ReplayOptions, ReplayReport, select
    from queen.pipelines.jobs.replay import replay as push_again

    options = ReplayOptions(
        root,
        tuple(queue or ()),
        to,
        _time(since, "--from"),
        _time(until, "--until"),
        condition,
        speed,
        new_ids,
        keep_producers=not own_name,
    )
    manifest = open_archive(root)
    spark = session("replay", master, conf)
    with manifest.reading() as snapshot, spark_failures():
        check_queues(snapshot.files, options.queues)
        files = files_of(snapshot.files, options.queues, options.since, options.until)
        total = select(spark, options, files).count()
    if dry_run:
        print(f"{total} messages in {len(files)} files would be replayed")
        return
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    connection = connect(server, token, None, data_directory)
    with ExitStack() as stack:
        directory = _report_directory(stack, StateDirectory(data_dir(data_directory)), root)
        progress = stack.enter_context(rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)))
        task = progress.add_task("replay", total=total)
        report = ReplayReport(directory, options, master, total)
        done = Replayed()

        def show(so_far: Replayed) -> None:
            nonlocal done
            done = so_far
            progress.update(task, completed=so_far.queued + so_far.duplicates)
            report.note(so_far)

        targets = [to] if to is not None else sorted({place_of(file)[0] for file in files})
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


def _report_directory(stack: ExitStack, state: StateDirectory, root: Path) -> Path:
    """Where a replay reports, for as long as it runs. Several of an archive may run at the same time."""
    name = f"replay-{root.resolve().name or 'archive'}"
    try:
        return stack.enter_context(state.running(name))
    except AlreadyRunning:
        return stack.enter_context(state.running(f"{name}-{os.getpid()}"))


@jobs.command()
def reconcile(
    root: ArchivePath,
    queue: Annotated[list[str] | None, typer.Option(help="Only this queue; may be repeated. [all archived]")] = None,
    allow_behind: Annotated[
        bool, typer.Option(help="Messages that came after the last archived one are no fault.")
    ] = False,
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
    from queen.pipelines.jobs.reconcile import reconcile as compare

    connection = connect(server, token, database_url, data_directory)
    with spark_failures():
        reports = compare(session("reconcile", master, conf), connection, root, tuple(queue or ()))
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
        rich.console.Console().print(table)
    bad = sum(not one.whole for one in reports)
    behind = sum(one.behind for one in reports)
    pushed = sum(one.pushed for one in reports)
    if bad:
        raise QueenError(f"{bad} of {len(reports)} partitions are not archived as they should be")
    if behind and not allow_behind:
        raise QueenError(f"{behind} messages are not archived yet: archive them, or allow it with --allow-behind")
    if not json:
        print(f"all {pushed - behind} messages of {len(reports)} partitions are in the archive, and the same there")


@jobs.command("dlq-report")
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

    with spark_failures():
        clusters = cluster(
            session("dlq-report", master, conf),
            connect(server, token, database_url, data_directory),
            queue=queue,
            since=_time(since, "--from"),
            until=_time(until, "--until"),
            samples=samples,
        )
    if json:
        print_json(clusters)
        return
    console = rich.console.Console()
    if not clusters:
        console.print("there are no dead letters")
    for one in clusters:
        console.print(f"{one.count} x {one.error}", style="bold", markup=False, highlight=False)
        queues, groups = ", ".join(one.queues), ", ".join(one.groups)
        console.print(f"    {queues}; groups {groups}; {one.first_at} to {one.last_at}", markup=False, highlight=False)
        for sample in one.samples:
            place = f"{sample.queue}/{sample.partition} {sample.transaction_id}"
            console.print(f"    {place}: {sample.error}: {sample.payload}", markup=False, highlight=False)


@jobs.command()
def rollup(
    since: Annotated[str | None, typer.Option("--from", help="From when on. [since the last time]")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Until before when. [the running minute]")] = None,
    every: Annotated[str | None, typer.Option(help="Go on, and roll up so often.")] = None,
    keep_days: Annotated[int, typer.Option(min=1, help="How long rolled up minutes are kept.")] = 90,
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
    pause = durations.milliseconds(every) if every is not None else None
    if every is not None and not pause:
        raise QueenError(f"--every {every}: expected {durations.EXPECTED}")
    from queen.pipelines.jobs.rollup import rollup as roll_up

    connection = connect(server, token, database_url, data_directory)
    spark = session("rollup", master, conf)
    begin = _time(since, "--from")
    while True:
        with spark_failures():
            keep = timedelta(days=keep_days)
            done = roll_up(spark, connection, since=begin, until=_time(until, "--until"), keep=keep)
        span = f"{done.since:%Y-%m-%d %H:%M} to {done.until:%Y-%m-%d %H:%M} UTC"
        print(f"{span}: {done.messages} messages of {done.queues} queues in {done.rows} rows", flush=True)
        if pause is None:
            return
        begin = None
        time.sleep(pause / 1000)


def _time(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    moment = parse_time(text)
    if moment is None:
        raise QueenError(f"{option} {text}: expected a time such as 2026-11-15T08:00:00Z")
    return moment.astimezone(UTC)
