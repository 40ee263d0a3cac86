"""Jobs and datasets as OpenLineage names them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from queen import __version__
from queen.pipelines.errors import cause_of
from queen.pipelines.lineage.emitter import Emitter, open_emitter

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

_PRODUCER: Final = f"urn:queen-broker:{__version__}"
_NAMESPACE: Final = "queen"
_SERVER_PORTS: Final = {"https": 443, "http": 80}

Fields = tuple[tuple[str, str], ...]
"""Names and types of columns, as far as they are known."""


class Event(Enum):
    """What has happened to a run. Nothing follows one of the last three."""

    START = "START"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    ABORT = "ABORT"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data by OpenLineage's rules of naming; names hold neither users nor passwords."""

    namespace: str
    name: str
    fields: Fields = ()


def queue_dataset(server: str, name: str, fields: Fields = ()) -> Dataset:
    """A queue, or a topic as `namespace/topic`."""
    parts = urlsplit(server)
    port = parts.port or _SERVER_PORTS.get(parts.scheme, 80)
    return Dataset(f"queen://{parts.hostname or 'localhost'}:{port}", name, fields)


def path_dataset(path: str, fields: Fields = ()) -> Dataset:
    """Files of this machine, or of an object store by their URL."""
    scheme, found, rest = path.partition("://")
    if not found or scheme == "file":
        return Dataset("file", str(Path(rest if found else path).absolute()), fields)
    bucket, _, key = rest.partition("/")
    return Dataset(f"{scheme}://{bucket.rpartition('@')[2]}", key or "/", fields)


def table_dataset(database: str, table: str, fields: Fields = ()) -> Dataset:
    """A table of PostgreSQL, by the URL of its database."""
    from psycopg.conninfo import conninfo_to_dict

    parts = {key: str(value) for key, value in conninfo_to_dict(database).items() if value}
    host = parts.get("host", "localhost").partition(",")[0]
    # A path is a socket of this machine.
    host = "localhost" if host.startswith("/") else host
    port = parts.get("port", "5432").partition(",")[0]
    name = parts.get("dbname") or parts.get("user", "postgres")
    return Dataset(f"postgres://{host}:{port}", f"{name}.{table if '.' in table else f'public.{table}'}", fields)


@dataclass(frozen=True, slots=True)
class Parent:
    """The run that a run belongs to."""

    namespace: str
    job: str
    run_id: str


def parent_of_environment() -> Parent | None:
    """OPENLINEAGE_PARENT_ID, `namespace/job/run id`, by which a scheduler says whose work this is."""
    namespace, _, rest = os.environ.get("OPENLINEAGE_PARENT_ID", "").partition("/")
    job, _, run_id = rest.rpartition("/")
    try:
        return Parent(namespace, job, str(uuid.UUID(run_id))) if namespace and job else None
    except ValueError:
        return None


@dataclass(slots=True)
class Job:
    """One run of one job."""

    emitter: Emitter
    name: str
    kind: str
    streaming: bool = False
    inputs: Sequence[Dataset] = ()
    outputs: Sequence[Dataset] = ()
    parent: Parent | None = None
    engine: str | None = None
    """The version of Spark, where it is known."""
    read: int | None = None
    written: int | None = None
    ended: bool = False
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def as_parent(self) -> Parent:
        return Parent(_namespace(), self.name, self.run_id)

    def emit(self, event: Event, error: str | None = None) -> None:
        """Does nothing after the run has ended."""
        if not self.ended:
            self.ended = event in (Event.COMPLETE, Event.ABORT, Event.FAIL)
            self.emitter.emit(self._event(event, error))

    def _event(self, event: Event, error: str | None) -> RunEvent:
        from openlineage.client import event_v2

        return event_v2.RunEvent(
            eventTime=datetime.now(UTC).isoformat(),
            eventType=event_v2.RunState[event.value],
            run=event_v2.Run(self.run_id, self._run_facets(error)),
            job=event_v2.Job(_namespace(), self.name, self._job_facets()),
            inputs=[
                event_v2.InputDataset(one.namespace, one.name, inputFacets=self._input_facets(), facets=_schema(one))
                for one in self.inputs
            ],
            outputs=[
                event_v2.OutputDataset(one.namespace, one.name, outputFacets=self._output_facets(), facets=_schema(one))
                for one in self.outputs
            ],
            producer=_PRODUCER,
        )

    def _run_facets(self, error: str | None) -> dict[str, Any]:
        from openlineage.client.facet_v2 import error_message_run, parent_run, processing_engine_run

        facets: dict[str, Any] = {}
        if self.engine is not None:
            facets["processing_engine"] = processing_engine_run.ProcessingEngineRunFacet(
                self.engine, "spark", __version__, producer=_PRODUCER
            )
        if self.parent is not None:
            facets["parent"] = parent_run.ParentRunFacet(
                parent_run.Run(self.parent.run_id),
                parent_run.Job(self.parent.namespace, self.parent.job),
                producer=_PRODUCER,
            )
        if error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(error, "PYTHON", producer=_PRODUCER)
        return facets

    def _job_facets(self) -> dict[str, Any]:
        from openlineage.client.facet_v2 import job_type_job

        processing = "STREAMING" if self.streaming else "BATCH"
        return {"jobType": job_type_job.JobTypeJobFacet(processing, "QUEEN", self.kind, producer=_PRODUCER)}

    def _input_facets(self) -> dict[str, Any]:
        from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

        # What is known is how much was read of all inputs together.
        if self.read is None or len(self.inputs) != 1:
            return {}
        return {"inputStatistics": statistics.InputStatisticsInputDatasetFacet(self.read, producer=_PRODUCER)}

    def _output_facets(self) -> dict[str, Any]:
        from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

        if self.written is None or len(self.outputs) != 1:
            return {}
        return {"outputStatistics": statistics.OutputStatisticsOutputDatasetFacet(self.written, producer=_PRODUCER)}


@contextmanager
def job_run(name: str, inputs: Iterable[Dataset], outputs: Iterable[Dataset]) -> Iterator[Job | None]:
    """Events of a job that begins and ends with the block; None, and none, where lineage is not configured."""
    emitter = open_emitter()
    if emitter is None:
        yield None
        return
    job = Job(emitter, name, "JOB", inputs=tuple(inputs), outputs=tuple(outputs), parent=parent_of_environment())
    job.emit(Event.START)
    try:
        yield job
    except BaseException as error:
        job.emit(Event.FAIL if isinstance(error, Exception) else Event.ABORT, cause_of(error))
        raise
    else:
        job.emit(Event.COMPLETE)
    finally:
        emitter.close()


def _namespace() -> str:
    return os.environ.get("OPENLINEAGE_NAMESPACE") or _NAMESPACE


def _schema(dataset: Dataset) -> dict[str, Any]:
    from openlineage.client.facet_v2 import schema_dataset

    if not dataset.fields:
        return {}
    fields = [
        schema_dataset.SchemaDatasetFacetFields(name, kind, ordinal_position=number)
        for number, (name, kind) in enumerate(dataset.fields, 1)
    ]
    return {"schema": schema_dataset.SchemaDatasetFacet(fields, producer=_PRODUCER)}
