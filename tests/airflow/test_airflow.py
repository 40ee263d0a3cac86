"""The provider in a real Airflow, in an environment of its own: it takes minutes to make, and gigabytes of memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.request import urlopen

import pytest

from queen.client.sync import QueenSync
from tests.acceptance.client_environment import clean_environ, installed
from tests.acceptance.served import served
from tests.support.ageing import block_until
from tests.support.ports import free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

AIRFLOW: Final = "apache-airflow==3.3.2"
_ROOT: Final = Path(__file__).parents[2]
_DAGS: Final = Path(__file__).with_name("dags")
_CONSTRAINTS: Final = Path(__file__).with_name("constraints.txt")
_PIPELINE: Final = """
pipeline: air-copies
sources:
  orders: {queue: air-orders, schema: "order int, shop int"}
sinks:
  out: {from: orders, queue: air-copy}
"""


@dataclass
class Airflow:
    """An Airflow with a database of its own, and the server that its connection names."""

    python: Path
    work: Path
    queen: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environ(self) -> dict[str, str]:
        connection = {"conn_type": "queen", "host": self.queen.removeprefix("http://")}
        extra = {"executable": str(Path(sys.executable).with_name("queen"))}
        return clean_environ() | {
            "AIRFLOW_HOME": str(self.work / "home"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(_DAGS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "false",
            "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "5",
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
            "AIRFLOW_CONN_QUEEN_DEFAULT": json.dumps(connection | {"extra": extra}),
            "QUEEN_TEST_DIRECTORY": str(self.work),
            "QUEEN_TEST_SOURCE": str(_ROOT / "src"),
            "OPENLINEAGE_DISABLED": "true",
        }

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.python.with_name("airflow")), *arguments], env=self.environ(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"airflow {' '.join(arguments)}\n{done.stdout[-20_000:]}{done.stderr[-10_000:]}"
        return done.stdout

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        with (self.work / f"{arguments[0]}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(self.python.with_name("airflow")), *arguments],
                env=self.environ() | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def state_of(self, dag: str) -> str | None:
        """Of the one task that a DAG has, in its only run."""
        found = self._fetch("SELECT state FROM task_instance WHERE dag_id = ?", dag)
        state = None if found is None else str(found[0])
        assert state != "failed", (self.work / "scheduler.log").read_text()[-10_000:]
        return state

    def knows(self, dag: str) -> bool:
        return self._fetch("SELECT 1 FROM serialized_dag WHERE dag_id = ?", dag) is not None

    def has_trigger(self) -> bool:
        return self._fetch("SELECT 1 FROM trigger WHERE triggerer_id IS NOT NULL") is not None

    def _fetch(self, query: str, *parameters: str) -> tuple[object, ...] | None:
        with closing(sqlite3.connect(f"file:{self.work}/home/airflow.db?mode=ro", uri=True)) as database:
            found: tuple[object, ...] | None = database.execute(query, parameters).fetchone()
        return found

    def stop(self) -> None:
        for process in self.processes:
            end(process, signal.SIGTERM)


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """With all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, number)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v2/version", timeout=30):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    work = tmp_path_factory.mktemp("airflow")
    python = installed(_ROOT / ".venv-airflow", (AIRFLOW, "pytest", "--editable", str(_ROOT)), _CONSTRAINTS)
    with ExitStack() as stack:
        server = stack.enter_context(served(work))
        airflow = Airflow(python, work, server.url)
        stack.callback(airflow.stop)
        airflow.command("db", "migrate")
        yield airflow


def depth(airflow: Airflow, queue: str) -> int:
    with QueenSync(airflow.queen, strict=True) as queen:
        found: int = queen.request("GET", f"/api/v1/resources/queues/{queue}/depth")["depth"]
        return found


def test_airflow_knows_the_provider_and_its_connection_type(airflow: Airflow) -> None:
    providers = json.loads(airflow.command("providers", "list", "--output", "json"))
    assert "queen-broker" in [one["package_name"] for one in providers]
    hooks = json.loads(airflow.command("providers", "hooks", "--output", "json"))
    assert [one["class"] for one in hooks if one["connection_type"] == "queen"] == ["queen.airflow.hook.QueenHook"]


def test_operators_sensor_and_trigger_by_themselves(airflow: Airflow) -> None:
    variables = {"QUEEN_URL": airflow.queen, "QUEEN_EXECUTABLE": str(Path(sys.executable).with_name("queen"))}
    # Beside this file it would load fixtures that need other packages.
    file = shutil.copy(Path(__file__).with_name("inside.py"), airflow.work)
    done = subprocess.run(
        [str(airflow.python), "-m", "pytest", "-q", "-c", os.devnull, str(file)],
        env=airflow.environ() | variables,
        cwd=airflow.work,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5000:]


def test_messages_are_pushed_awaited_and_consumed_and_then_archived_and_replayed(airflow: Airflow) -> None:
    airflow.command("dags", "test", "orders")
    loaded = [int(line) for line in (airflow.work / "loaded").read_text().split()]
    assert sorted(loaded) == list(range(20))
    (airflow.work / "orders.yaml").write_text(_PIPELINE)
    said = airflow.command("dags", "test", "jobs")
    assert "20 rows read, 20 written" in said
    assert depth(airflow, "air-again") == 5
    assert depth(airflow, "air-copy") == 20


def test_a_deferred_sensor_outlives_the_triggerer_that_waits_for_it(airflow: Airflow) -> None:
    port = free_port()
    address = {
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__API_AUTH__JWT_SECRET": os.urandom(32).hex(),
    }
    airflow.start("api-server", **address)
    airflow.start("dag-processor", **address)
    # Logs would be served on fixed ports of every interface.
    airflow.start("scheduler", "--skip-serve-logs", **address)
    triggerer = airflow.start("triggerer", "--skip-serve-logs", **address)
    block_until(lambda: is_healthy(port), "the API server answers", 300)
    block_until(lambda: airflow.knows("waits"), "the DAG is known", 300)
    airflow.command("dags", "trigger", "waits")
    block_until(lambda: airflow.state_of("waits") == "deferred", "the sensor is deferred", 300)
    block_until(airflow.has_trigger, "a triggerer has the trigger", 120)
    end(triggerer, signal.SIGKILL)
    with QueenSync(airflow.queen, strict=True) as queen:
        queen.queue("air-work").push([{"data": number} for number in range(3)])
    airflow.start("triggerer", "--skip-serve-logs", **address)
    block_until(lambda: airflow.state_of("waits") == "success", "the sensor is done", 300)
