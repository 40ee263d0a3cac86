"""OpenLineage events of pipelines: what they say, where they go, and that a dead backend is nothing to the run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from queen.pipelines.declaration import ONCE
from queen.pipelines.errors import PipelineError
from queen.pipelines.lineage.emitter import is_configured, open_emitter
from queen.pipelines.lineage.jobs import Dataset, Event, Job, job_run, path_dataset, queue_dataset, table_dataset
from queen.pipelines.lineage.runs import RunLineage, run_lineage
from queen.pipelines.loading import load
from queen.pipelines.run import Run, RunOptions
from queen.pipelines.session import Connection
from queen.wire.pipelines import PipelineStatus
from tests.pipelines.running import Runner
from tests.support.ageing import block_until
from tests.support.lineage import Backend, backend

PIPELINE = """
    pipeline: sales
    sources:
      orders: {files: DIR/in, files_per_batch: 1, schema: "shop string, amount int"}
    steps:
      large: {sql: "SELECT shop, amount FROM orders WHERE amount > 10"}
    sinks:
      kept: {from: large, parquet: DIR/kept}
      shown: {from: orders, console: true}
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """OpenLineage's client adds variables to the environment, which would outlive the test."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        del os.environ[name]
    os.environ["HOME"] = str(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def lineage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with backend() as found:
        monkeypatch.setenv("OPENLINEAGE_URL", found.url)
        yield found


async def run(runner: Runner, text: str, trigger: str = ONCE) -> PipelineStatus:
    declaration = load(runner.file(text))
    connection = Connection("http://queue-server:6632")
    with run_lineage(declaration, connection, trigger) as lineage:
        options = RunOptions(Path("test"), "local[2]", trigger=trigger)
        run = Run(declaration, connection, runner.state, options, lineage.report, lineage.planned)
        return await asyncio.to_thread(run.run, runner.session)


async def test_a_run_tells_its_inputs_outputs_schemas_and_counts(lineage: Backend, runner: Runner) -> None:
    runner.batch({"shop": "a", "amount": 5}, {"shop": "b", "amount": 50}, {"shop": "c", "amount": 70})
    os.environ["OPENLINEAGE_API_KEY"] = "key-1"
    os.environ["OPENLINEAGE_NAMESPACE"] = "shop"
    parent = "airflow/etl.sales/0190c4e5-0000-7000-8000-000000000001"
    os.environ["OPENLINEAGE_PARENT_ID"] = parent
    await run(runner, PIPELINE)
    assert lineage.types("sales") == ["START", "COMPLETE"]
    assert lineage.types("sales.kept") == lineage.types("sales.shown") == ["START", "COMPLETE"]
    assert lineage.authorizations == {"Bearer key-1"}
    whole = lineage.of("sales")[-1]
    above = whole["run"]["facets"]["parent"]
    assert f"{above['job']['namespace']}/{above['job']['name']}/{above['run']['runId']}" == parent
    kept = lineage.of("sales.kept")[-1]
    assert kept["job"]["namespace"] == "shop"
    assert kept["job"]["facets"]["jobType"]["processingType"] == "BATCH"
    assert kept["run"]["runId"] == lineage.of("sales.kept")[0]["run"]["runId"] != whole["run"]["runId"]
    assert kept["run"]["facets"]["parent"]["run"]["runId"] == whole["run"]["runId"]
    assert kept["run"]["facets"]["processing_engine"]["version"] == runner.spark.version
    (source,) = kept["inputs"]
    assert (source["namespace"], source["name"]) == ("file", str(runner.directory / "in"))
    assert source["inputFacets"]["inputStatistics"]["rowCount"] == 3
    (target,) = kept["outputs"]
    assert (target["namespace"], target["name"]) == ("file", str(runner.directory / "kept"))
    assert target["outputFacets"]["outputStatistics"]["rowCount"] == 2
    fields = [(one["name"], one["type"]) for one in target["facets"]["schema"]["fields"]]
    assert fields == [("shop", "string"), ("amount", "int")]
    assert lineage.of("sales.shown")[-1]["outputs"] == []


async def test_a_failure_is_reported_with_its_cause(lineage: Backend, runner: Runner) -> None:
    runner.batch({"shop": "a", "amount": 5})
    text = PIPELINE.replace("amount > 10", "raise_error('the till is open') IS NULL")
    with pytest.raises(PipelineError):
        await run(runner, text)
    failed = lineage.of("sales.kept")[-1]
    assert failed["eventType"] == "FAIL"
    assert "the till is open" in failed["run"]["facets"]["errorMessage"]["message"]
    assert lineage.types("sales")[-1] == "FAIL"


def test_events_go_to_a_file_where_the_configuration_says_so(tmp_path: Path) -> None:
    (tmp_path / "openlineage.yml").write_text(
        f"transport:\n  type: file\n  log_file_path: {tmp_path / 'events.ndjson'}\n  append: true\n"
    )
    with job_run("replay-archive", [path_dataset("/archive")], []):
        pass
    events = [json.loads(line) for line in (tmp_path / "events.ndjson").read_text().splitlines()]
    assert [(one["job"]["name"], one["eventType"]) for one in events] == [
        ("replay-archive", "START"),
        ("replay-archive", "COMPLETE"),
    ]


def test_a_backend_that_refuses_everything_is_logged_once_and_the_run_is_done(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    config = tmp_path / "lineage.yml"
    config.write_text(f"transport: {{type: http, url: 'http://127.0.0.1:{port}', retry: {{total: 1}}}}\n")
    os.environ["OPENLINEAGE_CONFIG"] = str(config)
    with caplog.at_level(logging.WARNING), job_run("replay-archive", [], []) as job:
        assert job is not None
    (record,) = [record for record in caplog.records if record.threadName == "openlineage"]
    assert "lineage events cannot be sent, which does not affect the run" in record.getMessage()


def test_a_backend_that_never_answers_holds_the_end_up_for_a_bounded_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen.pipelines.lineage.emitter._CLOSE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        os.environ["OPENLINEAGE_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with job_run("replay-archive", [path_dataset("/archive")], []) as job:
            assert job is not None
    assert [record.getMessage() for record in caplog.records if "lineage" in record.getMessage()] == [
        "lineage events cannot be sent, which does not affect the run: the backend has not taken them within 0 s"
    ]


def test_events_of_a_backend_that_comes_back_are_sent_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with backend() as found:
        (tmp_path / "openlineage.yml").write_text(
            f"transport: {{type: http, url: '{found.url}', retry: {{total: 0}}, endpoint: ''}}\n"
        )
        os.environ["OPENLINEAGE_CONFIG"] = "openlineage.yml"
        emitter = open_emitter()
        assert emitter is not None
        job = Job(emitter, "one", "JOB")
        # The backend refuses what comes to another path.
        job.emit(Event.START)
        block_until(lambda: emitter._failing, "the backend refuses the first event")
        vars(emitter._client.transport)["endpoint"] = "api/v1/lineage"
        job.emit(Event.COMPLETE)
        emitter.close()
        assert found.types("one") == ["COMPLETE"]
    assert "lineage events are sent again; 1 were lost" in caplog.text


def test_a_job_that_fails_and_one_that_is_interrupted(lineage: Backend) -> None:
    with pytest.raises(PipelineError), job_run("replay-a", [], [queue_dataset("http://h:6632", "orders")]):
        raise PipelineError("orders/Default: the queue is full")
    with pytest.raises(KeyboardInterrupt), job_run("replay-b", [], []):
        raise KeyboardInterrupt
    assert lineage.types("replay-a") == ["START", "FAIL"]
    assert lineage.of("replay-a")[-1]["run"]["facets"]["errorMessage"]["message"] == "orders/Default: the queue is full"
    assert lineage.types("replay-b") == ["START", "ABORT"]


def test_without_settings_nothing_is_made(tmp_path: Path) -> None:
    assert not is_configured({})
    assert open_emitter({}) is None
    assert not is_configured({"OPENLINEAGE_URL": "http://backend", "OPENLINEAGE_DISABLED": "true"})
    assert is_configured({"OPENLINEAGE__TRANSPORT__TYPE": "console"})
    (tmp_path / "openlineage.yml").touch()
    assert is_configured({})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"OPENLINEAGE_CONFIG": "/nowhere.yml"}, "OPENLINEAGE_CONFIG: /nowhere.yml cannot be read"),
        ({"OPENLINEAGE__TRANSPORT__TYPE": "pigeon"}, "cannot be used as it is configured"),
        ({"OPENLINEAGE_URL": "backend:5000"}, "cannot be used as it is configured"),
    ],
)
def test_wrong_settings_are_logged_and_no_error(
    settings: dict[str, str], said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert open_emitter() is None
    assert said in caplog.text


def test_queues_of_a_pattern_are_those_there_are_else_the_pattern(lineage: Backend, tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text("pipeline: all\nsources: {a: {queue_pattern: 'shop-.*'}}\nsinks: {b: {from: a, console: true}}\n")
    declaration = load(file)
    emitter = open_emitter()
    assert emitter is not None
    # The one database is not reachable.
    for databases in ((), ("postgresql://nobody@127.0.0.1:9/none",)):
        run = RunLineage(emitter, declaration, Connection("http://h:6632", databases=databases), None)
        assert list(run._inputs(declaration.sources[0])) == [queue_dataset("http://h:6632", "shop-.*")]
    emitter.close()


@pytest.mark.parametrize(
    ("dataset", "namespace", "name"),
    [
        (queue_dataset("http://user:secret@broker:6632/", "orders"), "queen://broker:6632", "orders"),
        (queue_dataset("https://broker", "shop/mail"), "queen://broker:443", "shop/mail"),
        (path_dataset("/data/archive"), "file", "/data/archive"),
        (path_dataset("file:///data/archive"), "file", "/data/archive"),
        (path_dataset("s3://key:secret@bucket/a/b"), "s3://bucket", "a/b"),
        (table_dataset("postgresql://u:secret@db:5433/shop", "totals"), "postgres://db:5433", "shop.public.totals"),
        (table_dataset("postgresql://u@/shop?host=/run/pg", "x.totals"), "postgres://localhost:5432", "shop.x.totals"),
    ],
)
def test_datasets_are_named_as_openlineage_says(dataset: Dataset, namespace: str, name: str) -> None:
    assert (dataset.namespace, dataset.name) == (namespace, name)
