"""The command `queen`: which commands there are, and how their errors end it."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
import typer.main

from queen import __version__
from queen.cli.common.exits import USER, fail, report
from queen.cli.common.tree import Entry, Root, UsageProblem, run_tree

_C: Final = "queen.cli.commands"
_T: Final = "queen.cli.tools"

ENTRIES: Final = (
    Entry(
        "serve",
        f"{_C}.server:serve_app",
        "Start the server, by default on an embedded PostgreSQL.",
        "Server",
        remote=False,
    ),
    Entry(
        "settings",
        f"{_C}.server:settings_app",
        "Show every setting with its meaning and its current value.",
        "Server",
        remote=False,
    ),
    Entry(
        "shards",
        "queen.cli.shards:app",
        "Shards: the PostgreSQL instances that DATABASE_URLS names.",
        "Server",
        remote=False,
    ),
    Entry(
        "proxy",
        "queen.cli.proxy:app",
        "Start the proxy: a login page, and a reverse proxy to the server for authenticated users.",
        "Server",
        remote=False,
    ),
    Entry("user", "queen.cli.user:app", "Users: people who log in, and their sessions.", "Server", remote=False),
    Entry("create-user", "queen.cli.user:create_app", "Add a user interactively.", "Server", remote=False),
    Entry("token", "queen.cli.token:app", "Tokens for programs: create and inspect them.", "Server", remote=False),
    Entry("cert", "queen.cli.cert:app", "Create a self-signed certificate.", "Server", remote=False),
    Entry(
        "backup", f"{_T}.backup:backup_app", "Write everything a server stores to a directory.", "Server", remote=False
    ),
    Entry("restore", f"{_T}.backup:restore_app", "Restore a backup.", "Server", remote=False),
    Entry("import", f"{_T}.legacy_import:app", "Import the data of a Queen 0.15.", "Server", remote=False),
    Entry("psql", "queen.cli.psql:app", "Open psql on the database of the server.", "Server", remote=False),
    Entry("ping", f"{_C}.health:ping_app", "Check that the server and its database answer.", "Health"),
    Entry("status", f"{_C}.health:status_app", "Show the message counts and the lag of queues.", "Health"),
    Entry("lag", f"{_C}.health:lag_app", "Show the lag of consumer groups.", "Health"),
    Entry("top", f"{_T}.top:app", "Watch queues, groups, lag and rates live.", "Health"),
    Entry("doctor", f"{_T}.doctor:app", "Check a deployment, and say what to do about what is wrong.", "Health"),
    Entry("bench", f"{_T}.bench:app", "Measure throughput and latency of pushes and pops.", "Health"),
    Entry("metrics", f"{_C}.system:metrics_app", "Print the server's metrics.", "Health"),
    Entry("analytics", f"{_C}.system:analytics_app", "Show metrics over time.", "Health", ("a", "an")),
    Entry(
        "push",
        f"{_C}.messaging:push_app",
        "Push messages to a queue, from stdin, a file or the command line.",
        "Messages",
    ),
    Entry("pop", f"{_C}.messaging:pop_app", "Take messages from a queue.", "Messages"),
    Entry("tail", f"{_C}.tail:app", "Print the messages of a queue as they come.", "Messages"),
    Entry("ack", f"{_C}.messaging:ack_app", "Acknowledge messages that were popped.", "Messages"),
    Entry("tx", f"{_C}.messaging:tx_app", "Apply acknowledgments and pushes in one transaction.", "Messages"),
    Entry("lease", f"{_C}.messaging:lease_app", "Leases of messages that were popped.", "Messages"),
    Entry("replay", f"{_C}.messaging:replay_app", "Make a group read a queue again from a point in time.", "Messages"),
    Entry("worker", "queen.cli.worker:app", "Run the tasks of an application.", "Messages", remote=False),
    Entry(
        "messages",
        f"{_C}.message:app",
        "Look at single messages, search and delete them.",
        "Messages",
        ("message", "msg"),
    ),
    Entry("dlq", f"{_C}.dlq:app", "Dead letters: list, report, redrive, edit, export and purge them.", "Messages"),
    Entry("trace", f"{_C}.trace:app", "Traces that consumers leave on messages.", "Messages", ("traces",)),
    Entry(
        "queue",
        f"{_C}.queue:app",
        "Queues: list, describe, configure, pause, resume, clear, delete, export, import.",
        "Resources",
        ("queues", "q"),
    ),
    Entry("partition", f"{_C}.queue:partition_app", "Partitions of queues.", "Resources", ("partitions", "p")),
    Entry(
        "group",
        f"{_C}.group:app",
        "Consumer groups: list, lag, seek, pause, resume, delete.",
        "Resources",
        ("groups", "cg"),
    ),
    Entry("topic", f"{_C}.topic:app", "Topics: priority queues of items.", "Resources", ("topics",)),
    Entry("stream", f"{_C}.stream:app", "Streaming queries and their state.", "Resources", ("streams",)),
    Entry("kv", f"{_C}.state:kv_app", "Keys and values of namespaces.", "Resources"),
    Entry("lock", f"{_C}.state:lock_app", "Locks that are held.", "Resources", ("locks",)),
    Entry("timer", f"{_C}.state:timer_app", "Timers: messages that are pushed later.", "Resources", ("timers",)),
    Entry("namespace", f"{_C}.queue:namespace_app", "Namespaces of queues.", "Resources", ("namespaces", "ns")),
    Entry("task", f"{_C}.queue:task_app", "Tasks of queues.", "Resources", ("tasks",)),
    Entry(
        "pipeline",
        "queen.cli.pipelines.commands:pipeline",
        "Data pipelines on Apache Spark: windows, joins, archives and reports over queues.",
        "Resources",
        remote=False,
    ),
    Entry(
        "apply",
        f"{_T}.manifest:apply_app",
        "Bring queues, groups, topics, quotas, write modes and pipelines into the state a file describes.",
        "Resources",
    ),
    Entry("export", f"{_T}.manifest:export_app", "Write the file that `queen apply` reads.", "Resources"),
    Entry(
        "maintenance", f"{_C}.system:maintenance_app", "Maintenance modes of pushes and pops.", "Operations", ("maint",)
    ),
    Entry("audit", "queen.cli.audit:app", "Show the audit log.", "Operations"),
    Entry("config", f"{_C}.config:app", "Contexts: servers and their tokens.", "Configuration"),
    Entry("login", f"{_C}.config:login_app", "Log in to the server of a context.", "Configuration"),
    Entry("logout", f"{_C}.config:logout_app", "Delete the token of a context.", "Configuration"),
    Entry(
        "completion",
        f"{_C}.config:completion_app",
        "Print the completion script of a shell.",
        "Configuration",
        remote=False,
    ),
    Entry("docs", f"{_C}.config:docs_app", "Print where the documentation is.", "Configuration"),
    Entry(
        "version", f"{_C}.health:version_app", "Print the version of the command and of the server.", "Configuration"
    ),
)


class _Queen(Root):
    entries = ENTRIES


app = typer.Typer(
    name="queen",
    cls=_Queen,
    help="Queen: a message queue, task queue and stream platform on PostgreSQL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"queen {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Queen: a message queue, task queue and stream platform on PostgreSQL."""


def tree() -> Any:
    """The command with everything below it, as typer makes it."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that its user can act on is one line on stderr, not a traceback."""
    _prepare_streams()
    sys.exit(execute(arguments))


def _prepare_streams() -> None:
    """Have text of any language, and a stream that the shell closed (`>&-`), be no error of a command."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal takes its own encoding only; files and other programs take JSON, which is UTF-8.
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="backslashreplace")


def execute(arguments: Sequence[str] | None = None, root: Any = None) -> int:
    """Run the command line, and return its exit code; `root` is a tree that was built before."""
    # What the client logs is raised as well, and one line is enough.
    logging.getLogger("queen.client").addHandler(logging.NullHandler())
    try:
        return run_tree(tree() if root is None else root, arguments)
    except UsageProblem as error:
        return fail(USER, str(error))
    except typer.Abort:
        return fail(USER, "stopped")
    except Exception as error:
        return report(error)
