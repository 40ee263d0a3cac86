"""Pipelines on Apache Spark: how they run, and what was declared of them. The server itself runs none."""

from __future__ import annotations

import shlex

import msgspec

from queen.errors import NotFound
from queen.http.routing.call import Call
from queen.http.routing.context import Api
from queen.http.routing.query import read_time
from queen.http.routing.route import DATABASE, FOUND, RouteTable
from queen.http.server.message import Access
from queen.wire.api.operations.pipelines import (
    DeclarePipeline,
    PipelineDeclaration,
    PipelineDeclarations,
    PipelineDeclared,
    PipelineForgotten,
    PipelineList,
    PipelineSections,
    Replay,
    ReplayCommand,
)
from queen.wire.pipelines import statuses
from queen.wire.push import check_name
from queen.wire.times import iso_millis

routes = RouteTable("System")

_DECLARATIONS = "/api/v1/pipeline-declarations"
_EXAMPLE = {
    "sources": {"events": {"queue": "lead-events", "schema": "lead string, points int"}},
    "steps": {"once": {"from": "events", "dedup": ["lead"]}},
    "sinks": {"sales": {"from": "once", "queue": "lead-scores"}},
}


@routes.on_worker(
    "GET",
    "/api/v1/pipelines",
    access=Access.READ_ONLY,
    summary="Pipelines of this host",
    description="Runs on Apache Spark beside the server, from the files in which they report.",
    returns={200: PipelineList},
)
async def list_pipelines(api: Api, call: Call[None, None]) -> PipelineList:
    found = statuses(api.settings.queen_data_dir / "pipelines")
    return PipelineList(pipelines=sorted(found, key=lambda status: status.name))


@routes.on_worker(
    "POST",
    "/api/v1/pipelines/replay",
    access=Access.ADMIN,
    summary="How to replay an archive",
    description="The server runs no Apache Spark, so it answers with the command that does.",
    body=Replay,
    body_example={"archive": "/data/archive", "queue": "orders", "toQueue": "orders-again"},
    returns={200: ReplayCommand},
)
async def replay_archive(api: Api, call: Call[None, Replay]) -> ReplayCommand:
    asked = call.body
    for name, where in ((asked.queue, "queue"), (asked.to_queue, "toQueue")):
        if name is not None:
            check_name(name, "Queue", where)
    flags = {
        "--queue": asked.queue,
        "--to": asked.to_queue,
        "--from": iso_millis(read_time(asked.since, "from")) if asked.since is not None else None,
        "--until": iso_millis(read_time(asked.until, "to")) if asked.until is not None else None,
    }
    command = ["queen", "pipeline", "replay", asked.archive]
    command += [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return ReplayCommand(started=False, command=shlex.join(command))


# What a pipeline writes to may have a password in its address, so these are for administrators alone.
@routes.on_worker(
    "GET",
    _DECLARATIONS,
    access=Access.ADMIN,
    summary="Declared pipelines",
    description="As `queen apply` declared them. `queen pipeline run NAME` runs one.",
    returns={200: PipelineDeclarations},
    errors=DATABASE,
)
async def list_declarations(api: Api, call: Call[None, None]) -> PipelineDeclarations:
    rows = await api.brokers[0].database.fetch("pipeline_declarations")
    return PipelineDeclarations(
        declarations=[
            PipelineDeclaration(
                name=row["name"],
                declaration=msgspec.json.decode(row["declaration"], type=PipelineSections),
                changed_at=iso_millis(row["changed_at"]),
            )
            for row in rows
        ]
    )


@routes.on_worker(
    "PUT",
    _DECLARATIONS,
    access=Access.ADMIN,
    summary="Declare a pipeline",
    description="In place of what was declared under its name. Runs that are under way go on as they began.",
    body=DeclarePipeline,
    body_example={"name": "leads", "declaration": _EXAMPLE},
    returns={200: PipelineDeclared},
    errors=DATABASE,
)
async def declare(api: Api, call: Call[None, DeclarePipeline]) -> PipelineDeclared:
    name = call.body.name
    check_name(name, "Pipeline", "name")
    text = msgspec.json.encode(call.body.declaration).decode()
    rows = await api.brokers[0].database.fetch("pipeline_declare", name, text)
    return PipelineDeclared(name=name, created=bool(rows and rows[0]["created"]), changed=bool(rows))


@routes.on_worker(
    "DELETE",
    f"{_DECLARATIONS}/{{pipeline}}",
    access=Access.ADMIN,
    summary="Forget the declaration of a pipeline",
    description="Its checkpoints and its results stay, and so does a run that is under way.",
    returns={200: PipelineForgotten},
    errors=FOUND,
)
async def forget(api: Api, call: Call[None, None]) -> PipelineForgotten:
    name = call.name("pipeline")
    if not await api.brokers[0].database.fetch("pipeline_forget", name):
        raise NotFound("Pipeline not found: it was not declared")
    return PipelineForgotten(name=name, deleted=True)
