"""The commands of `queen pipeline`: one runs in a process of its own, and others see it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from queen.cli.pipelines.example import place_pipeline
from queen.pipelines.errors import AlreadyRunning, PipelineError
from queen.pipelines.state import StateDirectory
from queen.wire.pipelines import PipelineState, PipelineStatus, QueryStatus, write_status
from tests.conftest import StartServer
from tests.pipelines.running import in_process
from tests.support.api import Api

_QUEEN = str(Path(sys.executable).with_name("queen"))
_FILE = """\
pipeline: ticking
trigger: 100 ms
sources: {ticks: {rate: 50}}
sinks: {kept: {from: ticks, parquet: DIR/out}}
"""
_SMALL = ("--master", "local[1]", "--conf", "spark.driver.memory=512m")
_SHORT = ("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@asynccontextmanager
async def _running(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        _QUEEN, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.timeout(600)
async def test_a_pipeline_runs_is_seen_by_everyone_and_stops_when_asked(
    tmp_path: Path, start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = tmp_path / "ticking.yaml", tmp_path / "data"
    file.write_text(_FILE.replace("DIR", str(tmp_path)))
    api = await start_server(queen_data_dir=data)
    where = ("--data-dir", str(data))
    async with _running("pipeline", "run", str(file), *_SMALL, *_SHORT, *where) as child:
        async with asyncio.timeout(400):
            while not _rows_read(data):
                assert child.returncode is None
                await asyncio.sleep(0.1)
        code, out, _ = in_process(capsys, "pipeline", "status", "ticking", "--json", *where)
        status = json.loads(out)
        assert (code, status["state"], status["pid"]) == (0, "running", child.pid)
        code, out, _ = in_process(capsys, "pipeline", "list", *where)
        assert code == 0
        assert "ticking" in out and "running" in out
        answer = await api.call("GET", "/metrics/prometheus")
        assert 'queen_pipeline_state{pipeline="ticking",state="running"} 1.0' in answer.body
        rows = _metric(answer.body, 'queen_pipeline_rows_total{pipeline="ticking",sink="kept"}')
        assert rows > 0
        code, _, err = in_process(capsys, "pipeline", "run", str(file), *where)
        assert code == 1
        assert "pipeline 'ticking' runs already" in err
        code, out, err = in_process(capsys, "pipeline", "stop", "ticking", "--timeout", "300", *where)
        assert (code, err) == (0, "")
        assert "pipeline 'ticking' is stopped" in out
        assert await child.wait() == 0
    answer = await api.call("GET", "/metrics/prometheus")
    assert 'queen_pipeline_state{pipeline="ticking",state="stopped"} 1.0' in answer.body
    assert "queen_pipeline_rows_total{" not in answer.body
    code, _, err = in_process(capsys, "pipeline", "stop", "ticking", *where)
    assert code == 1
    assert "does not run (it is stopped)" in err


def _rows_read(data: Path) -> int:
    return sum(query.rows for status in StateDirectory(data).statuses() for query in status.queries)


def _metric(text: str, name: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return float(line.rpartition(" ")[2])


@pytest.mark.soak  # It starts a JVM for a signal that differs from that of a stop in who else takes it: PySpark.
@pytest.mark.timeout(600)
async def test_ctrl_c_ends_a_run_as_a_stop_does(tmp_path: Path) -> None:
    file, data = tmp_path / "ticking.yaml", tmp_path / "data"
    file.write_text(_FILE.replace("DIR", str(tmp_path)))
    async with _running("pipeline", "run", str(file), *_SMALL, *_SHORT, "--data-dir", str(data)) as child:
        async with asyncio.timeout(400):
            while not _rows_read(data):
                assert child.returncode is None
                await asyncio.sleep(0.1)
        child.send_signal(signal.SIGINT)
        out, _ = await child.communicate()
    assert child.returncode == 0
    assert "pipeline 'ticking' is stopped: " in out.decode()


def test_validate_lists_each_problem_on_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("sources:\n  a: {qeue: a}\nsinks:\n  b: {from: c, queue: b}\n  d: {from: a, topic: t}\n")
    code, out, err = in_process(capsys, "pipeline", "validate", "--no-spark", str(file))
    first, *problems = err.splitlines()
    assert (code, out, first) == (1, "", "queen: the pipeline cannot be used:")
    assert [problem.partition(": ")[0] for problem in problems] == [f"  {file}:{line}" for line in (2, 4, 5)]


def test_without_java_commands_say_what_to_install_and_the_rest_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(_FILE.replace("DIR", str(tmp_path)))
    for name, value in {"PATH": str(tmp_path), "JAVA_HOME": "", "QUEEN_DATA_DIR": str(tmp_path / "data")}.items():
        monkeypatch.setenv(name, value)
    for arguments in (
        ("run", str(file)),
        ("validate", str(file)),
        ("archive", "orders", "--to", str(tmp_path / "archive")),
        ("replay", str(tmp_path)),
        ("reconcile", str(tmp_path)),
        ("rollup",),
        ("dlq-report",),
        ("example", str(tmp_path / "example")),
    ):
        code, out, err = in_process(capsys, "pipeline", *arguments)
        assert (code, out) == (1, ""), arguments
        assert "needs Java 17 or newer" in err
        assert "apt install openjdk-17-jre-headless" in err
    code, out, _ = in_process(capsys, "pipeline", "validate", "--no-spark", str(file))
    assert (code, "is good: 1 sources" in out) == (0, True)
    code, out, _ = in_process(capsys, "version")
    assert code == 0


def test_a_spark_that_does_not_start_is_said_with_what_to_check(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(_FILE.replace("DIR", str(tmp_path)))
    command = [_QUEEN, "pipeline", "run", str(file), "--conf", "spark.driver.memory=much", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Invalid maximum heap size: -Xmxmuch" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("queen: Spark did not start on local[*]: Java gateway process exited")
    assert last.endswith("check --master, --conf and JAVA_HOME")
    assert "Traceback" not in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_write_that_fails_is_said_in_a_line_without_the_traces_of_spark(
    api: Api, dsn: str, tmp_path: Path
) -> None:
    await api.push("orders", {"id": 1})
    for step, said in (("'no json' AS x", "is not JSON"), ("1 / (id - 1) AS x", "Division by zero")):
        file = tmp_path / "p.yaml"
        file.write_text(
            f'sources: {{o: {{queue: orders, schema: id int}}}}\nsteps: {{s: {{sql: "SELECT {step} FROM o"}}}}\n'
            "sinks: {out: {from: s, queue: copy, payload: x}}\n"
        )
        child = await asyncio.create_subprocess_exec(
            *(
                _QUEEN,
                "pipeline",
                "run",
                str(file),
                "--once",
                "--fresh",
                "--data-dir",
                str(tmp_path),
                "--server",
                api.url,
            ),
            *("--database-url", dsn, *_SMALL),
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await child.communicate()
        assert child.returncode == 1
        lines = err.decode().splitlines()
        assert lines[-1].startswith("queen: sink 'out' failed: ") and said in lines[-1]
        # Python says more where a process of Spark could not start in time, and is started again.
        assert not [line for line in lines if " spark ERROR " in line or line.startswith(("\tat ", "{"))]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("run", "nowhere.yaml"), "there is no file nowhere.yaml"),
        (("status", "nobody"), "no pipeline 'nobody' has run here"),
        (("stop", "nobody"), "no pipeline 'nobody' has run here"),
        (("compact", "."), ". is not an archive; make one with"),
        (("replay", ".", "--from", "yesterday"), "--from yesterday: expected a time"),
        (("replay", ".", "--as-of", "old"), "--as-of old: expected a version of `queen pipeline versions`, or a time"),
        (("replay", ".", "--speed", "0"), "--speed 0: expected a number above 0"),
        (("replay", ".", "--to", ""), "the name of a queue must not be empty (at --to)"),
        (
            ("replay", ".", "--from", "2026-01-02", "--until", "2026-01-01"),
            "--from 2026-01-02 is after --until 2026-01-01",
        ),
        (("archive", "q", "--to", "taken/x"), "taken/x/_checkpoints: Not a directory. Check the path"),
        (("archive", "q", "--to", "x", "--every", "often"), "--every often: expected a length of time"),
        (("archive", "", "--to", "x"), "the name of a queue must not be empty (at argument 1)"),
        (("archive", "q", "q", "--to", "x"), "queue 'q' is named twice"),
        (("rollup", "--every", "often"), "--every often: expected a length of time"),
        (("rollup", "--until", "soon"), "--until soon: expected a time"),
        (("dlq-report", "--from", "yesterday"), "--from yesterday: expected a time"),
        (("reconcile", "."), ". is not an archive; make one with"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.setenv("QUEEN_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    code, _, err = in_process(capsys, "pipeline", *arguments)
    assert code == 1
    assert expected in err
    assert "Traceback" not in err


async def test_the_server_passes_over_files_that_are_no_status(tmp_path: Path, start_server: StartServer) -> None:
    data = tmp_path / "data"
    api = await start_server(queen_data_dir=data)
    for name, text in (("broken", "{"), ("other", "[]")):
        (data / "pipelines" / name).mkdir(parents=True)
        (data / "pipelines" / name / "status.json").write_text(text)
    good = data / "pipelines" / "good"
    good.mkdir()
    now = time.time()
    query = QueryStatus(name="out", rows=7, lag=3, late=1)
    write_status(good, _status("good", now, [query]))
    (data / "pipelines" / "silent").mkdir()
    write_status(data / "pipelines" / "silent", _status("silent", now - 3600, [query]))
    answer = await api.call("GET", "/metrics/prometheus")
    assert answer.status == 200
    assert 'queen_pipeline_lag_messages{pipeline="good",sink="out"} 3.0' in answer.body
    assert 'queen_pipeline_late_rows_total{pipeline="good",sink="out"} 1.0' in answer.body
    assert 'queen_pipeline_state{pipeline="silent",state="failed"} 1.0' in answer.body
    assert 'pipeline="silent",sink' not in answer.body
    assert "broken" not in answer.body


def _status(name: str, at: float, queries: list[Any]) -> PipelineStatus:
    return PipelineStatus(
        name=name,
        state=PipelineState.RUNNING,
        pid=1,
        file="p.yaml",
        master="local",
        started_at=at,
        updated_at=at,
        queries=queries,
    )


def test_a_pipeline_runs_once_at_a_time_and_one_that_died_is_known_to_have(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    with state.running("p") as directory:
        write_status(directory, _status("p", time.time(), []))
        assert state.status("p").state is PipelineState.RUNNING
        with pytest.raises(AlreadyRunning, match="runs already"), state.running("p"):
            pass
    died = state.status("p")
    assert (died.state, died.error) == (PipelineState.FAILED, "its process was killed")
    with pytest.raises(PipelineError, match="does not run"):
        state.stop("p", 1)


def test_the_example_leaves_a_file_alone_that_was_edited(tmp_path: Path) -> None:
    file = place_pipeline(tmp_path)
    assert str(tmp_path / "lead-scores") in file.read_text()
    file.write_text("# mine")
    assert place_pipeline(tmp_path) == file
    assert file.read_text() == "# mine"
