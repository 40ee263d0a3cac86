"""From the routes and their descriptions to the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from queen import __version__
from queen.http.routing.query import parameters_of
from queen.http.routing.route import Media, Operation
from queen.http.server.message import Access, Response, Route
from queen.wire.fields import Answer, Error, Name, SnakeAnswer, Uuid

_REF: Final = "#/components/schemas/{name}"
_JSON: Final = "application/json"
_OTHER_TAG: Final = "Other"

# A parameter of a path means the same in every path.
PATH_PARAMETERS: Final[Mapping[str, tuple[Any, str]]] = {
    "queue": (Name, "The name of a queue."),
    "partition": (Name, "The name of a partition."),
    "group": (Name, "The name of a consumer group."),
    "lease": (Uuid, "The `leaseId` that came with the messages."),
    "transaction": (Name, "The `transactionId` of a message."),
    "name": (Name, "The name of a trace."),
}
# Where a message is addressed, its partition is named by id.
_PARTITION_IDS: Final = ("/api/v1/messages/", "/api/v1/traces/")

_DESCRIPTION: Final = """\
Queen is a message queue on PostgreSQL: ordered partitions, consumer groups, leases, dead letters, transactions.

Every failure is answered with `{"error": "what is wrong, where, and what to do"}`. A 503 carries `Retry-After`.
Unknown fields and query parameters are refused with 400. A `limit`, `offset` or `batch` out of range becomes the
nearest number in range; one that is not a number counts as absent.
"""

_SUCCESSES: Final = {
    101: "The connection speaks WebSocket from here on.",
    200: "Success.",
    201: "Stored.",
    202: "Accepted.",
    204: "No messages.",
}
_REFUSALS: Final = {
    400: "The request is wrong; nothing was stored.",
    401: "A token is needed, or the one sent is not valid (only when JWT_ENABLED is set).",
    415: "A web page has to send JSON.",
    403: "The token does not allow this (only when JWT_ENABLED is set).",
    404: "What the request names does not exist.",
    409: "The request contradicts what is stored, or an encrypted message lacks its key.",
    413: "The body is larger than MAX_BODY_BYTES.",
    426: "This route takes WebSocket connections only.",
    429: "Too many requests, or a quota is used up; try again after `Retry-After`.",
    503: "PostgreSQL is unavailable or overloaded; try again after `Retry-After`.",
}


TAGS: Final[Mapping[str, str]] = {
    "Messaging": "Push, pop and acknowledge messages.",
    "Queues": "Create, configure and list queues.",
    "Consumer groups": "Positions of groups: show them and seek.",
    "Messages": "Single messages.",
    "Dead letters": "Messages that could not be processed.",
    "Ephemeral": "Queues in unlogged tables: fast, and empty after a crash of PostgreSQL.",
    "State": "Keys and values, locks and timers: beside messages, and in their transactions.",
    "Topics": "Priority queues with delayed delivery, retries and quotas.",
    "Tasks": "Applications of queen.tasks: their tasks, jobs and workers.",
    "Traces": "Events that consumers record about a message.",
    "Streams": "Windows and state of stream processors.",
    "Staging": "Batches of messages that are written in pieces and published together, once.",
    "Status": "The state of the server and its queues, now and over time.",
    "System": "Maintenance, and communication between servers.",
    "Health": "Health probes.",
    "Documentation": "This description.",
}


def build_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document. A route without a declaration is in it too, as far as its pattern and access describe it."""
    described = [(route, route.declaration or _undescribed(route)) for route in routes]
    schemas = _Schemas(_types(described))
    paths: dict[str, dict[str, Any]] = {}
    for route, operation in described:
        paths.setdefault(route.pattern, {})[route.method.lower()] = _operation(route, operation, schemas)
    used = {operation.tag for _, operation in described}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Queen",
            "version": __version__,
            "summary": "The HTTP API of the Queen message queue.",
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [
            {"name": tag, "description": TAGS.get(tag, tag)} for tag in dict.fromkeys((*TAGS, *used)) if tag in used
        ],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "JWT",
                    "description": "Needed only when the server runs with JWT_ENABLED=true.",
                }
            },
        },
    }


class _Schemas:
    """The JSON schemas of the types in use; those with a name are components."""

    def __init__(self, types: Sequence[Any]) -> None:
        schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._found = list(zip(types, schemas, strict=True))
        # Answers may get more fields in later versions.
        answers = {kind.__name__ for kind in (*_subclasses(Answer), *_subclasses(SnakeAnswer))}
        self.components = {
            name: _open(schema) if name in answers else schema for name, schema in sorted(components.items())
        }

    def of(self, wanted: Any) -> dict[str, Any]:
        return dict(next(schema for kind, schema in self._found if kind is wanted))


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the ban on other fields."""
    return {key: value for key, value in schema.items() if key != "additionalProperties" or value is not False}


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _types(described: Iterable[tuple[Route, Operation]]) -> list[Any]:
    found: list[Any] = [str, Error, Uuid, *(kind for kind, _ in PATH_PARAMETERS.values())]
    for _, operation in described:
        found += [kind for kind in operation.returns.values() if kind is not None and not isinstance(kind, Media)]
        if operation.body is not None and not isinstance(operation.body, Media):
            found.append(operation.body)
    # By identity: equal types may differ in what they say of themselves.
    return list({id(kind): kind for kind in found}.values())


def _undescribed(route: Route) -> Operation:
    words = [word.strip("{}") for word in route.pattern.split("/") if word]
    return Operation(
        method=route.method,
        path=route.pattern,
        access=route.access,
        handler=lambda api, request: Response(204),
        kind="direct",
        id="_".join((route.method.lower(), *words)),
        summary=f"{route.method} {route.pattern}",
        returns={200: None},
        tag=_OTHER_TAG,
    )


def _operation(route: Route, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    access = route.access.name.lower().replace("_", "-")
    made: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "description": f"{operation.description}\n\nAccess: {access}.".strip(),
        "tags": [operation.tag],
        "x-access": access,
        "security": [] if route.access is Access.PUBLIC else [{}, {"bearer": []}],
        "parameters": [*_path_parameters(route, schemas), *_query_parameters(operation)],
        "responses": _responses(route, operation, schemas),
    }
    if operation.body is not None:
        media = operation.body.media_type if isinstance(operation.body, Media) else _JSON
        content = {"schema": {} if isinstance(operation.body, Media) else schemas.of(operation.body)}
        if operation.body_example is not None:
            content["example"] = operation.body_example
        made["requestBody"] = {"required": operation.body_required, "content": {media: content}}
    return made


def _path_parameters(route: Route, schemas: _Schemas) -> Iterator[dict[str, Any]]:
    for name in route.parameters:
        kind, meaning = PATH_PARAMETERS.get(name, (str, f"The {name}."))
        if name == "partition" and route.pattern.startswith(_PARTITION_IDS):
            kind, meaning = Uuid, "The `partitionId` of a message."
        yield {"name": name, "in": "path", "required": True, "description": meaning, "schema": schemas.of(kind)}


def _query_parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for parameter in parameters_of(operation.query):
        schema = dict(parameter.schema)
        meaning = schema.pop("description", "")
        if parameter.default is not None and parameter.default != "":
            schema["default"] = parameter.default
        yield {
            "name": parameter.name,
            "in": "query",
            "required": parameter.required,
            "description": meaning,
            "schema": schema,
        }


def _responses(route: Route, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    made = {status: _answer(status, kind, operation, schemas) for status, kind in operation.returns.items()}
    made |= {status: _refusal(status, schemas) for status in refusals(route, operation)}
    return {str(status): made[status] for status in sorted(made)}


def _answer(status: int, kind: Any, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": _REFUSALS.get(status) or _SUCCESSES[status]}
    if isinstance(kind, Media):
        # Of a stream the schema would be that of each event, and these differ.
        answer["content"] = {kind.media_type: {} if operation.streams else {"schema": schemas.of(str)}}
    elif kind is not None:
        content = {"schema": schemas.of(kind)}
        if operation.example is not None and status < 300:
            content["example"] = operation.example
        answer["content"] = {_JSON: content}
    return answer


def _refusal(status: int, schemas: _Schemas) -> dict[str, Any]:
    refusal: dict[str, Any] = {
        "description": _REFUSALS[status],
        "content": {_JSON: {"schema": schemas.of(Error)}},
    }
    if status in (429, 503):
        wait = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        refusal["headers"] = {"Retry-After": wait}
    return refusal


def refusals(route: Route, operation: Operation) -> list[int]:
    """The statuses of errors that a route can answer with."""
    statuses = {400, *operation.errors}
    if route.access is not Access.PUBLIC:
        statuses |= {401, 403, 429, 503}
    if operation.body is not None:
        statuses |= {413, 415}
    return sorted(statuses - operation.returns.keys())
