"""Operators that run pipelines, archives and replays: the command `queen pipeline` in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from airflow.sdk import BaseOperator

from queen.airflow.connection import ServerConnection
from queen.airflow.hook import DEFAULT_CONNECTION, QueenHook
from queen.errors import QueenError

_STOP_SECONDS: Final = 60.0
_LAST_LINES: Final = 20


class QueenJobOperator(BaseOperator):
    """Runs `queen pipeline …`, with its output in the log of the task; its last line is the result.

    Spark and Queen may be installed elsewhere than Airflow: `executable` is the `queen` to run (also as extra
    `executable` of the connection). The server, its token and `database_url` go to it as variables, `env` besides.
    """

    template_fields: Sequence[str] = ("arguments", "env", "queen_conn_id", "data_dir", "master")
    ui_color = "#e4d7f4"

    def __init__(
        self,
        *,
        arguments: Sequence[str] = (),
        master: str | None = None,
        spark_conf: Mapping[str, str] | None = None,
        data_dir: str | None = None,
        executable: str | None = None,
        env: Mapping[str, str] | None = None,
        queen_conn_id: str = DEFAULT_CONNECTION,
        **options: Any,
    ) -> None:
        """`arguments`: more of them, as on the command line."""
        super().__init__(**options)
        self.arguments = list(arguments)
        self.master = master
        self.spark_conf = dict(spark_conf or {})
        self.data_dir = data_dir
        self.executable = executable
        self.env = dict(env or {})
        self.queen_conn_id = queen_conn_id
        self._process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        """The command and its own arguments."""
        raise NotImplementedError

    def execute(self, context: Any) -> str:
        server = QueenHook(self.queen_conn_id).read()
        command = [find_executable(self.executable or server.executable), "pipeline", *self.command()]
        if self.master is not None:
            command += ["--master", self.master]
        for key, value in self.spark_conf.items():
            command += ["--conf", f"{key}={value}"]
        if self.data_dir is not None:
            command += ["--data-dir", self.data_dir]
        command += self.arguments
        self.log.info("running %s", " ".join(command))
        return self._run(command, os.environ | _variables(server, context) | self.env)

    def _run(self, command: Sequence[str], environ: Mapping[str, str]) -> str:
        lines: list[str] = []
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Spark's processes belong to it; a signal to Airflow's group is not for them.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                lines = [*lines[-_LAST_LINES:], line.rstrip()]
                self.log.info("%s", line.rstrip())
            code = self._process.wait()
        except BaseException:
            self.on_kill()
            raise
        if code:
            said = "\n".join(lines) or "it printed nothing"
            raise QueenError(f"queen {command[1]} {command[2]} exited with {code}:\n{said}")
        return lines[-1] if lines else ""

    def on_kill(self) -> None:
        """End it as Ctrl-C would: what it has done is kept, and the next run goes on from there."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.log.warning("process %d has not ended within %.0f s; killing it", process.pid, _STOP_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class QueenPipelineOperator(QueenJobOperator):
    """Runs a pipeline over what is available now; the next run goes on where this one ended.

        QueenPipelineOperator(task_id="leads", pipeline="/pipelines/leads.py")

    `pipeline` is a Python or YAML file, or the name of one that `queen apply` declared.
    """

    template_fields = (*QueenJobOperator.template_fields, "pipeline")

    def __init__(
        self,
        *,
        pipeline: str,
        once: bool = True,
        fresh: bool = False,
        fail_on_data_loss: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.pipeline = pipeline
        self.once = once
        self.fresh = fresh
        self.fail_on_data_loss = fail_on_data_loss

    def command(self) -> list[str]:
        return [
            "run",
            self.pipeline,
            *_flags(once=self.once, fresh=self.fresh, fail_on_data_loss=self.fail_on_data_loss),
        ]


class QueenArchiveOperator(QueenJobOperator):
    """Archives what queues hold now and have not archived before.

    QueenArchiveOperator(task_id="archive", queue_names=["orders", "payments"], to="/data/archive")
    """

    template_fields = (*QueenJobOperator.template_fields, "queue_names", "to", "consumer_group")

    def __init__(
        self,
        *,
        queue_names: Sequence[str],
        to: str,
        consumer_group: str | None = None,
        fresh: bool = False,
        fail_on_data_loss: bool | None = None,
        **options: Any,
    ) -> None:
        """`consumer_group`: one that shows how far the archive is."""
        super().__init__(**options)
        self.queue_names = [queue_names] if isinstance(queue_names, str) else list(queue_names)
        self.to = to
        self.consumer_group = consumer_group
        self.fresh = fresh
        self.fail_on_data_loss = fail_on_data_loss

    def command(self) -> list[str]:
        flags = _flags(once=True, fresh=self.fresh, fail_on_data_loss=self.fail_on_data_loss, group=self.consumer_group)
        return ["archive", *self.queue_names, "--to", self.to, *flags]


class QueenReplayOperator(QueenJobOperator):
    """Pushes messages of an archive again; a retry of the task pushes none twice, unless `new_ids`.

    QueenReplayOperator(
        task_id="replay", archive="/data/archive", queue_names=["orders"], to="orders-test",
        since="{{ data_interval_start.isoformat() }}", until="{{ data_interval_end.isoformat() }}",
    )
    """

    template_fields = (*QueenJobOperator.template_fields, "archive", "queue_names", "to", "since", "until", "condition")

    def __init__(
        self,
        *,
        archive: str,
        queue_names: Sequence[str] = (),
        to: str | None = None,
        since: str | None = None,
        until: str | None = None,
        condition: str | None = None,
        speed: float | None = None,
        new_ids: bool = False,
        own_name: bool = False,
        **options: Any,
    ) -> None:
        """`condition`: SQL over the columns of messages."""
        super().__init__(**options)
        self.archive = archive
        self.queue_names = [queue_names] if isinstance(queue_names, str) else list(queue_names)
        self.to = to
        self.since = since
        self.until = until
        self.condition = condition
        self.speed = speed
        self.new_ids = new_ids
        self.own_name = own_name

    def command(self) -> list[str]:
        queues = [part for name in self.queue_names for part in ("--queue", name)]
        named = {"--from": self.since, "--until": self.until, "--filter": self.condition, "--to": self.to}
        options = [part for name, value in named.items() if value is not None for part in (name, value)]
        flags = _flags(speed=self.speed, new_ids=self.new_ids, own_name=self.own_name)
        return ["replay", self.archive, *queues, *options, *flags]


def find_executable(given: str | None) -> str:
    """The `queen` to run: as given, else beside this Python, else in the PATH. Raises `QueenError`."""
    beside = Path(sys.executable).with_name("queen")
    found = shutil.which(given) if given else str(beside) if beside.exists() else shutil.which("queen")
    if found is None:
        where = f"there is no executable {given}" if given else "there is no executable 'queen'"
        raise QueenError(
            f"{where}: pip install '.[spark]' in a clone, here or elsewhere, and name it with executable=… or as extra"
            " 'executable' of the connection"
        )
    return found


def _variables(server: ServerConnection, context: Any) -> dict[str, str]:
    """Secrets are no arguments: all users of a machine see those."""
    variables = {"QUEEN_SERVER": server.urls[0]}
    if server.token is not None:
        variables["QUEEN_TOKEN"] = server.token
    if server.database_url is not None:
        variables["DATABASE_URLS"] = server.database_url
    parent = _lineage_parent(context)
    if parent is not None:
        variables["OPENLINEAGE_PARENT_ID"] = parent
    return variables


def _lineage_parent(context: Any) -> str | None:
    """This task as OpenLineage knows it, where Airflow's provider for that is installed."""
    try:
        from airflow.providers.openlineage.plugins.macros import lineage_parent_id
    except ImportError:
        return None
    parent: str = lineage_parent_id(context["ti"])
    return parent


def _flags(**values: Any) -> list[str]:
    """Options by their names: `--name`, `--no-name`, `--name value`; those that are None or false by default, none."""
    found: list[str] = []
    for name, value in values.items():
        option = name.replace("_", "-")
        if value is True:
            found.append(f"--{option}")
        elif value is False and name == "fail_on_data_loss":
            found.append(f"--no-{option}")
        elif value is not None and value is not False:
            found += [f"--{option}", str(value)]
    return found
