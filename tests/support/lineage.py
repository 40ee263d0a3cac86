"""A backend for OpenLineage events: a real HTTP server that checks and keeps them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Event = dict[str, Any]


def check(event: Event) -> None:
    """Raises where the event is not one of OpenLineage's: their classes know every field, and check ids and times."""
    from openlineage.client import event_v2

    run = event_v2.Run(**event["run"])
    job = event_v2.Job(**event["job"])
    inputs = [event_v2.InputDataset(**one) for one in event["inputs"]]
    outputs = [event_v2.OutputDataset(**one) for one in event["outputs"]]
    rebuilt = event_v2.RunEvent(
        eventTime=event["eventTime"],
        eventType=event_v2.RunState(event["eventType"]),
        run=run,
        job=job,
        inputs=inputs,
        outputs=outputs,
        producer=event["producer"],
    )
    assert event.keys() <= {"eventTime", "eventType", "run", "job", "inputs", "outputs", "producer", "schemaURL"}
    assert rebuilt.schemaURL == event["schemaURL"]
    every: list[Any] = [run.facets, job.facets, *(one.facets for one in (*inputs, *outputs))]
    every += [one.inputFacets for one in inputs] + [one.outputFacets for one in outputs]
    for facets in every:
        _check_facets(facets)


def _check_facets(facets: Any) -> None:
    from openlineage.client import facet_v2

    known: Mapping[str, Any] = {
        "processing_engine": facet_v2.processing_engine_run.ProcessingEngineRunFacet,
        "parent": facet_v2.parent_run.ParentRunFacet,
        "errorMessage": facet_v2.error_message_run.ErrorMessageRunFacet,
        "tags": facet_v2.tags_run.TagsRunFacet,
        "jobType": facet_v2.job_type_job.JobTypeJobFacet,
        "schema": facet_v2.schema_dataset.SchemaDatasetFacet,
        "inputStatistics": facet_v2.input_statistics_input_dataset.InputStatisticsInputDatasetFacet,
        "outputStatistics": facet_v2.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
    }
    for name, facet in facets.items():
        values = {key: value for key, value in facet.items() if not key.startswith("_")}
        rebuilt = known[name](**values, producer=facet["_producer"])
        assert rebuilt._schemaURL == facet["_schemaURL"]


class Backend:
    """Events in the order in which they came."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[Event] = []
        self.authorizations: set[str | None] = set()

    def of(self, job: str) -> list[Event]:
        return [event for event in self.events if event["job"]["name"] == job]

    def types(self, job: str) -> list[str]:
        return [event["eventType"] for event in self.of(job)]


@contextmanager
def backend() -> Iterator[Backend]:
    """Answers 400 to an event that is not one of OpenLineage's."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                assert self.path == "/api/v1/lineage"
                event = json.loads(body)
                check(event)
            except (AssertionError, KeyError, TypeError, ValueError) as error:
                self.send_error(400, repr(error))
                return
            found.events.append(event)
            found.authorizations.add(self.headers.get("Authorization"))
            self.send_response(201)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Backend(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
